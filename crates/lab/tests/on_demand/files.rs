//! Files that the backend's nginx sends with sendfile. nginx passes on a reference to the file's bytes in their place,
//! and the backend's agent sends them to the client straight from the file. If a file changes before that, the client's
//! connection may end early, but no wrong byte is sent.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_lab::{Ending, Fetch};
use shunt_odb::place::Version;
use shunt_testbed::{same_bytes, wait_for, wait_or_fail};

use crate::lost::{disturb, is_honest};
use crate::service::Running;
use crate::{handed_off, long_bytes, options, paths, program, run, run_with};

/// Waits until each file has been unchanged for so long that programs send references to it, and do not copy it.
fn until_settled(service: &Running<'_>) -> Result<()> {
    wait_for("the files have settled", || {
        for file in std::fs::read_dir(&service.files)? {
            let version = Version::of(File::open(file?.path())?)?;
            if version.is_some_and(|version| !version.is_settled()) {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// Waits until the backend's nginx sends files by reference.
fn settle(service: &Running<'_>) -> Result<()> {
    until_settled(service)?;
    // nginx sends a reference to a long file from the first time on, and to a short file from the second time on.
    wait_or_fail("files are referred to", || {
        service.whole(&Fetch::new(service.service.chain().server()).run(service.lab.client(), &paths(1))?)?;
        Ok(service.service.stats(service.lab.backend())?.count("store.files") >= 2)
    })
}

#[test]
fn files_pass_by_all_tiers() -> Result<()> {
    run(options(), |service| {
        settle(service)?;
        let before = handed_off(service)?;
        service.whole(&Fetch::new(service.service.chain().server()).run(service.lab.client(), &paths(5))?)?;
        let (handed, long) = (handed_off(service)? - before, long_bytes(5));
        ensure!(handed * 10 > long * 9, "{handed} of {long} bytes were handed off");
        Ok(())
    })
}

/// Name of a change to a file, whether the file's old bytes can still be read after it, and the change itself.
type Fate = (&'static str, bool, fn(&Path) -> Result<()>);

fn open(path: &Path) -> Result<File> {
    Ok(OpenOptions::new().write(true).open(path)?)
}

/// Changes to a file of 1 MiB or more. A change that overwrites or removes bytes does so at least near the file's end:
/// a client that waits has not got these bytes yet.
const FATES: [Fate; 5] = [
    ("left", true, |_| Ok(())),
    ("truncated", false, |path| Ok(open(path)?.set_len(700_000)?)),
    ("overwritten", false, |path| {
        let end = path.metadata()?.len() - 100_000;
        Ok(open(path)?.write_all_at(&[0x55; 4096], end)?)
    }),
    ("replaced", true, |path| {
        let new = path.with_extension("new");
        std::fs::write(&new, [1; 100_000])?;
        Ok(std::fs::rename(&new, path)?)
    }),
    ("deleted", true, |path| Ok(std::fs::remove_file(path)?)),
];

#[test]
fn a_file_that_changes_while_it_is_sent_costs_a_connection_and_no_byte() -> Result<()> {
    for (fate, stays, happens) in FATES {
        run(options(), |service| {
            settle(service)?;
            let ending = disturb(service, |service| happens(&service.files.join("7m")))?;
            is_honest(&ending).with_context(|| format!("it was {fate}"))?;
            ensure!((ending == Ending::Whole) == stays, "it was {fate}: {ending}");
            Ok(())
        })?;
    }
    Ok(())
}

fn begun(service: &Running<'_>) -> Result<u64> {
    service.counted("frontend.fe_begun")
}

const LENGTH: usize = 1 << 20;

/// Returns what a client gets of a file that is changed after the program has read all of it by reference.
fn ask(at: SocketAddr, name: &str, happens: impl FnOnce() -> Result<()>) -> Result<Vec<u8>> {
    let mut client = TcpStream::connect(at)?;
    client.set_read_timeout(Some(Duration::from_secs(20)))?;
    client.write_all(format!("/{name}").as_bytes())?;
    let mut here = [0; 10];
    client.read_exact(&mut here)?;
    happens()?;
    client.write_all(b"!")?;
    let mut got = Vec::new();
    match client.read_to_end(&mut got) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => Err(error).context(name.to_owned()),
        _ => Ok(got),
    }
}

#[test]
fn a_file_that_changes_before_a_client_gets_it_costs_a_connection_and_no_byte() -> Result<()> {
    run_with(&FATES.map(|(fate, ..)| (fate, LENGTH as u64)), options(), |service| {
        until_settled(service)?;
        let (python, at) = program::start(service, include_str!("later.py"), &[&LENGTH.to_string()])?;
        let client = service.lab.client();
        // By this download, the program learns which machine sends to such clients.
        client.run(|| ask(at, FATES[0].0, || Ok(())))??;
        for (fate, stays, happens) in FATES {
            let (before, file) = (begun(service)?, std::fs::read(service.files.join(fate))?);
            let asked = client.run(|| ask(at, fate, || happens(&service.files.join(fate))))?;
            let got = asked.with_context(|| format!("a file that was {fate}: {}", python.log()))?;
            let expected = file.get(..got.len()).unwrap_or(&file);
            same_bytes(&got, expected).with_context(|| format!("a file that was {fate}: {}", python.log()))?;
            ensure!((got.len() == LENGTH) == stays, "{} bytes of a file that was {fate}: {}", got.len(), python.log());
            ensure!(begun(service)? > before, "a file that was {fate} was not handed off: {}", python.log());
        }
        Ok(())
    })
}
