//! Python programs at both ends of connections, each under `shunt run` or without it. Each end uses its connections in
//! a random way, and must get the bytes that the other end has sent.

use std::process::Stdio;

use shunt_odb::store::Limits;

use crate::bed::{Bed, Program, free_address};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/peers.py");

fn talk(bed: &Bed, seed: u64, serving: bool, asking: bool) {
    let address = free_address();
    let command = |under_shunt: bool, role: &str| {
        let mut command = if under_shunt { bed.under_shunt("python3") } else { bed.plain("python3") };
        command.args(["-B", SCRIPT, role, &address.port().to_string(), &seed.to_string()]).stdin(Stdio::null());
        Program(command.spawn().unwrap())
    };
    let mut server = command(serving, "serve");
    let mut client = command(asking, "ask");
    let (asked, served) = (client.0.wait().unwrap(), server.0.wait().unwrap());
    assert!(asked.success() && served.success(), "seed {seed}, {serving} {asking}: client {asked}, server {served}");
}

#[test]
fn whatever_two_programs_do_they_get_each_others_bytes() {
    let bed = Bed::new(Limits::default());
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    for turn in 0..5 {
        for ends in 0..4 {
            talk(&bed, seed + turn, ends & 1 != 0, ends & 2 != 0);
        }
    }
}
