//! Tests of where keys are and where they are not (processes' memory, logs, statistics, core dumps), and of which
//! records one key decrypts (opens). A *generation* is the time between two KeyUpdates, in which one key is used.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use memchr::memmem;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use shunt_lab::{Host, Lab, Options, Process, Role, Settings};
use shunt_testbed::{PATIENCE, same_bytes, skipped};

use crate::bed::{on_tls, options};
use crate::client::{Client, Target};
use crate::midway::MIDDLE;
use crate::nonces::captured;
use crate::opened::{Generation, records, secrets, stream};
use crate::service::{FILES, needs_root, start_on};

/// Secret bytes to search for, and their name.
struct Needle {
    what: String,
    bytes: Vec<u8>,
}

/// Returns the secret and the key of each of the first `count` generations, which are numbered from 0.
fn needles(first: &[u8], count: usize) -> Result<Vec<Needle>> {
    let mut needles = Vec::new();
    for (index, secret) in secrets(first, count).into_iter().enumerate() {
        let key = Generation::of(&secret)?.bytes;
        needles.push(Needle { what: format!("key {index}"), bytes: key });
        needles.push(Needle { what: format!("secret {index}"), bytes: secret });
    }
    Ok(needles)
}

fn found<'a>(bytes: &[u8], needles: &'a [Needle]) -> impl Iterator<Item = &'a str> {
    let there = |needle: &&Needle| memmem::find(bytes, &needle.bytes).is_some();
    needles.iter().filter(there).map(|needle| needle.what.as_str()).collect::<Vec<_>>().into_iter()
}

/// Returns the needles that are in the memory of a host's processes with the name `name`. The kernel shows this memory
/// to root (proc_pid_mem(5)).
fn in_memory<'a>(host: &Host, name: &str, needles: &'a [Needle]) -> Result<BTreeSet<&'a str>> {
    let (mut all, mut read) = (BTreeSet::new(), 0);
    for pid in host.pids()? {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if comm.trim() != name {
            continue;
        }
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        for line in std::fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
            let (range, rest) = line.split_once(' ').context("a mapping")?;
            let (from, to) = range.split_once('-').context("a range")?;
            let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
            if !rest.starts_with('r') {
                continue;
            }
            let mut bytes = vec![0; usize::try_from(to - from)?];
            // Some of the kernel's own mappings cannot be read.
            if memory.read_exact_at(&mut bytes, from).is_ok() {
                read += bytes.len();
                all.extend(found(&bytes, needles));
            }
        }
    }
    ensure!(read > 1 << 20, "{read} bytes of {name} on {}", host.name());
    Ok(all)
}

fn none_of(found: &BTreeSet<&str>, where_: &str, but: &[&str]) -> Result<()> {
    let bad: Vec<_> = found.iter().filter(|what| !but.contains(what)).collect();
    ensure!(bad.is_empty(), "{where_}: {bad:?}");
    Ok(())
}

#[test]
fn keys_are_in_no_process_that_has_passed_them_on_or_used_them() -> Result<()> {
    needs_root();
    on_tls(1, |service| {
        let (lab, target) = (service.lab, Target::of(service));
        let (frontend, backend) = (lab.frontend(), lab.backend());
        let (client, body) = lab.client().run(|| -> Result<_> {
            let mut client = Client::connect(&target)?;
            for name in ["1k", "64k", "1m"] {
                client.get(&target, name)?;
            }
            let mut body = client.ask("64m")?;
            client.read(&mut body, MIDDLE)?;
            Ok((client, body))
        })??;
        let needles = needles(&client.told()?.secret, 6)?;

        // The fourth response is under way with the key of generation 4 (counted from 0). The backend's agent seals
        // with this key, and the frontend's OpenSSL has the generation's secret.
        let sealing = in_memory(backend, "shuntd", &needles)?;
        ensure!(sealing.contains("key 4"), "a key that is in use was not found: {sealing:?}");
        none_of(&sealing, "the backend's agent", &["key 4"])?;
        let terminating = in_memory(frontend, "nginx", &needles)?;
        ensure!(terminating.contains("secret 4"), "a secret that is in use was not found: {terminating:?}");
        none_of(&terminating, "the frontend's nginx", &["key 4", "secret 4"])?;
        none_of(&in_memory(frontend, "shuntd", &needles)?, "the frontend's agent", &[])?;
        none_of(&in_memory(backend, "nginx", &needles)?, "the backend's nginx", &[])?;
        none_of(&in_memory(lab.intermediates()[0], "nginx", &needles)?, "the intermediate's nginx", &[])?;

        lab.client().run(|| -> Result<()> {
            let mut client = client;
            client.finish(&target, body, "64m")
        })??;
        for host in [frontend, backend] {
            let where_ = format!("the agent of {} afterwards", host.name());
            none_of(&in_memory(host, "shuntd", &needles)?, &where_, &[])?;
        }
        Ok(())
    })
}

/// Has nginx log all that it can.
fn debug_log(_: &Lab, host: &Host) -> String {
    format!("        error_log {}/debug.log debug;\n", host.dir().display())
}

/// Returns all files below a directory.
fn files_below(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        match entry.file_type()? {
            kind if kind.is_dir() => files.extend(files_below(&entry.path())?),
            kind if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
    Ok(files)
}

/// Returns the needles as they are, and their first 16 bytes in the forms in which programs print bytes.
fn printed(needles: Vec<Needle>) -> Vec<Needle> {
    let mut all = Vec::new();
    for Needle { what, bytes } in needles {
        let join = |text: Vec<String>, between: &str| text.join(between).into_bytes();
        let each = |print: fn(&u8) -> String| bytes[..16].iter().map(print).collect::<Vec<_>>();
        let hex = each(|byte| format!("{byte:02x}"));
        let forms = [
            join(hex.clone(), ""),
            join(hex.clone(), " "),
            join(hex, "").to_ascii_uppercase(),
            join(each(u8::to_string), ", "),
            bytes,
        ];
        all.extend(forms.map(|bytes| Needle { what: what.clone(), bytes }));
    }
    all
}

#[test]
fn no_key_is_in_logs_or_statistics() -> Result<()> {
    needs_root();
    let settings = Settings { agent_debug: true, locations: Some(debug_log), ..options().settings };
    start_on(Lab::builder(), crate::bed::FILES, Options { settings, ..options() }, |service| {
        let (lab, target) = (service.lab, Target::of(service));
        let told = lab.client().run(|| -> Result<_> {
            let mut client = Client::connect(&target)?;
            ["1k", "64k", "1m"].into_iter().try_for_each(|name| client.get(&target, name))?;
            client.told()
        })??;
        let needles = printed(needles(&told.secret, 5)?);
        let mut logged = Vec::new();
        for file in files_below(&lab.dir())? {
            let bytes = std::fs::read(&file)?;
            none_of(&found(&bytes, &needles).collect(), &file.display().to_string(), &[])?;
            logged.extend_from_slice(&bytes);
        }
        ensure!(memmem::find(&logged, b"shunt: handoff complete").is_some(), "nginx has logged no handoff");
        for host in lab.hosts_of(Role::Frontend).chain(lab.hosts_of(Role::Backend)) {
            let stats = service.service.stats(host)?.0.to_string();
            none_of(&found(stats.as_bytes(), &needles).collect(), "statistics", &[])?;
        }
        Ok(())
    })
}

/// Ends a process by a signal that dumps core. Returns whether the kernel made a core dump, which may be as large as
/// the hard limit allows.
fn dumps_core(process: &mut Process) -> Result<bool> {
    // The limit is raised only up to the hard limit: more takes CAP_SYS_RESOURCE, which even root may lack.
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    let pid = Pid::from_raw(process.pid().cast_signed());
    prlimit(pid, Resource::Core, Rlimit { current: maximum, maximum }).context("allowing a core dump")?;
    process.signal(Signal::ABORT)?;
    Ok(std::os::unix::process::ExitStatusExt::core_dumped(&process.wait(PATIENCE)?))
}

#[test]
fn agents_leave_no_core_dump() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, Options::shunt(), |service| {
        let lab = service.lab;
        let mut sleep = Command::new("sleep");
        sleep.arg("60").current_dir(lab.client().dir());
        if !dumps_core(&mut lab.client().spawn(sleep)?)? {
            let why = "nothing dumps core here (ulimit -Hc, /proc/sys/kernel/core_pattern)";
            skipped("agents_leave_no_core_dump", why);
            return Ok(());
        }
        for host in [lab.frontend(), lab.backend()] {
            let agent = service.service.agent_process(host)?.context("an agent")?;
            ensure!(!dumps_core(agent)?, "the agent of {} dumped core", host.name());
            service.service.kill_agent(host)?;
            service.service.restart_agent(host)?;
        }
        Ok(())
    })
}

/// Returns the content of all records that a key opens with some record number.
fn readable(key: &Generation, records: &[&[u8]]) -> Vec<u8> {
    let numbers = 0..records.len() as u64;
    let open = |record: &&[u8]| numbers.clone().find_map(|number| key.open(record, number));
    records
        .iter()
        .filter_map(open)
        .flat_map(|mut content| {
            content.pop(); // the content type
            content
        })
        .collect()
}

/// The backend of the second response gets the key of generation 2, counted from 0. (The first test of this file shows
/// that the backend's agent has such a key.) This key must decrypt this response and the KeyUpdate after it, and
/// nothing else.
#[test]
fn a_handed_over_key_opens_its_response_and_nothing_else() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let target = Target::of(service);
        let (capture, told) = captured(service, |service| {
            service.lab.client().run(|| {
                let mut client = Client::connect(&target)?;
                ["16k", "64k", "1k"].into_iter().try_for_each(|name| client.get(&target, name))?;
                client.told()
            })?
        })?;
        let capture = std::fs::read(capture)?;
        let (theirs, ours) = (stream(&capture, 443, told.client_port)?, stream(&capture, told.client_port, 443)?);
        let (theirs, ours) = (records(&theirs, false)?, records(&ours, false)?);
        let key = Generation::of(&secrets(&told.secret, 3)[2])?;

        let read = readable(&key, &theirs);
        let end = memmem::find(&read, b"\r\n\r\n").context("no header")? + 4;
        ensure!(read.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&read[..end]));
        let body = std::fs::read(service.files.join("64k"))?;
        same_bytes(&read[end..], &[&body[..], &[24, 0, 0, 1, 0]].concat()).context("what comes after its header")?;
        ensure!(readable(&key, &ours).is_empty(), "something that the client sent was read");
        ensure!(ours.len() >= 4, "{} records of the client's", ours.len());
        Ok(())
    })
}
