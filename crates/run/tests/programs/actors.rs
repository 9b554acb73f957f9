//! actor.c at both ends and in the middle of connections. Each of the three processes runs under `shunt run` or without
//! it, in all combinations, also with AddressSanitizer. The two ends know the bytes of both streams, and check that
//! they get these bytes. A *store* is the part of an agent that keeps the bodies of its machine's programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use shunt_odb::store::Limits;

use crate::bed::{Bed, Program, free_address};

/// Compiles the file `source` of tests/programs into the program `name` in `directory`.
pub fn built(directory: &Path, source: &str, name: &str, compiler: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs")).join(source);
    let program = directory.join(name);
    let status = Command::new(compiler).args(flags).arg("-o").arg(&program).arg(&source).status().unwrap();
    assert!(status.success(), "{compiler} does not compile {}", source.display());
    program
}

/// Returns seeds to run with. `SEED=… cargo test …` runs one of them again.
pub fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let given = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let first = given.unwrap_or_else(|| u64::from(std::process::id()) * 1000);
    first..first + given.map_or(count, |_| 1)
}

/// Programs of a conversation: `end` asks and serves, and `relay`, which may be the same program, relays.
pub struct Actors<'a> {
    pub bed: &'a Bed,
    pub end: &'a Path,
    pub relay: &'a Path,
}

impl Actors<'_> {
    /// Has a conversation for each of the eight choices of which programs run under `shunt run`.
    pub fn converse_in_all_ways(&self, seed: u64) {
        println!("SEED={seed}");
        for ends in 0..8 {
            self.converse([ends & 1 != 0, ends & 2 != 0, ends & 4 != 0], seed);
        }
    }

    /// Has one conversation. `under_shunt` says for the asking, the relaying and the serving program whether it is
    /// under `shunt run`.
    fn converse(&self, under_shunt: [bool; 3], seed: u64) {
        let (port, next) = (free_address().port().to_string(), free_address().port().to_string());
        let seed_text = seed.to_string();
        let start = |machine: usize, under_shunt: bool, program: &Path, arguments: &[&str]| {
            let machine = self.bed.machine(machine);
            let program = program.to_str().unwrap();
            let mut command = if under_shunt { machine.under_shunt(program) } else { machine.plain(program) };
            command.args(arguments).arg(&seed_text).env("ASAN_OPTIONS", "detect_leaks=0").stdin(Stdio::null());
            Program(command.spawn().unwrap())
        };
        let mut programs = [
            ("serve", start(2, under_shunt[2], self.end, &["serve", &next])),
            ("relay", start(1, under_shunt[1], self.relay, &["relay", &port, &next])),
            ("ask", start(0, under_shunt[0], self.end, &["ask", &port])),
        ];
        let deadline = Instant::now() + Duration::from_secs(110);
        for (role, program) in &mut programs {
            program.ends_well(deadline, &format!("SEED={seed}, under Shunt {under_shunt:?}: {role}"), || ());
        }
    }
}

/// Has the conversations of [`Actors::converse_in_all_ways`] for each seed, with one program at both ends and in the
/// middle.
pub fn conversations(
    actor: impl Fn(&Path) -> PathBuf,
    machines: usize,
    limits: Limits,
    seeds: impl Iterator<Item = u64>,
) {
    let bed = Bed::of(machines, limits);
    let actor = actor(&bed.path());
    let actors = Actors { bed: &bed, end: &actor, relay: &actor };
    for seed in seeds {
        actors.converse_in_all_ways(seed);
    }
}

pub fn fortified(directory: &Path) -> PathBuf {
    built(directory, "actor.c", "actor", "gcc", &["-O2", "-Wall", "-D_FORTIFY_SOURCE=2"])
}

fn sanitized(directory: &Path) -> PathBuf {
    built(directory, "actor.c", "actor-asan", "clang-14", &["-g", "-O1", "-fsanitize=address"])
}

#[test]
fn programs_get_what_they_would_get_without() {
    conversations(fortified, 3, Limits::default(), seeds(3));
}

#[test]
fn the_sanitizer_finds_nothing() {
    conversations(sanitized, 1, Limits::default(), seeds(2));
}

/// The store has few and small segments (parts of its memory), and is full most of the time.
#[test]
fn a_full_store_changes_nothing() {
    let segment_bytes = 256 << 10;
    conversations(fortified, 3, Limits { bytes: 3 * segment_bytes, segment_bytes, ..Limits::default() }, seeds(2));
}

#[test]
#[ignore = "takes ten minutes"]
fn programs_get_what_they_would_get_without_a_hundred_times() {
    conversations(fortified, 3, Limits::default(), seeds(100));
    conversations(sanitized, 1, Limits::default(), seeds(20));
}
