//! Sessions (uses of the connection between two agents) of agents that are silent, stand still or restart, and of
//! machines that use another machine's name.

use std::net::IpAddr;

use shunt_simulator::machine::{address, name};
use shunt_simulator::{Fault, Script};
use shunt_wire::peer::{Hello, Protocol, padded_name};
use zerocopy::FromZeros;

use super::{ms, seconds};

fn sessions_lost(script: &Script, machine: usize) -> u64 {
    script.logic(machine).shared.counts.sessions_lost
}

#[test]
fn an_agent_that_only_listens_is_heard_all_the_same() {
    let mut script = Script::new(2);
    script.run(seconds(10));
    assert_eq!([0, 1].map(|machine| sessions_lost(&script, machine)), [0, 0]);
}

#[test]
fn agents_with_different_heartbeats_keep_their_session() {
    let mut script = Script::with(2, |machine, settings| settings.heartbeat = [ms(100), ms(1000)][machine]);
    script.run(seconds(10));
    assert_eq!([0, 1].map(|machine| sessions_lost(&script, machine)), [0, 0]);
}

#[test]
fn agents_that_stood_still_together_keep_their_sessions() {
    let mut script = Script::new(3);
    (0..3).for_each(|machine| script.fail(Fault::Stop { machine, pause: seconds(3) }));
    script.run(seconds(5));
    assert_eq!([0, 1, 2].map(|machine| sessions_lost(&script, machine)), [0, 0, 0]);
}

#[test]
fn a_silent_peer_is_lost_within_two_seconds_and_comes_back() {
    let mut script = Script::new(2);
    script.fail(Fault::Cut { one: 0, other: 1, pause: seconds(4) });
    script.run(seconds(2));
    assert_eq!([0, 1].map(|machine| sessions_lost(&script, machine)), [1, 1]);
    script.end();
}

fn hello(from: usize) -> Hello {
    Hello { protocol: Protocol::OURS, name: padded_name(&name(from)), ..Hello::new_zeroed() }
}

#[test]
fn a_clone_of_a_machine_takes_no_session_from_it() {
    let mut script = Script::new(2);
    let mut admit = |from: IpAddr| {
        script.event(1, |logic, call| logic.admit(&hello(0), |_| true, from, |_| Some(address(0)), call))
    };
    let refused = admit(address(7)).unwrap_err();
    assert!(refused.why.contains("two machines use the certificate"), "{}", refused.why);
    assert_eq!(sessions_lost(&script, 1), 0);
}

#[test]
fn a_certificate_admits_only_the_machine_of_its_name() {
    let mut script = Script::new(2);
    let admitted = script.event(1, |logic, call| {
        logic.admit(&hello(0), |claimed| claimed == name(5), address(0), |_| Some(address(0)), call)
    });
    assert!(admitted.is_err());
    assert_eq!(sessions_lost(&script, 1), 0);
}

#[test]
fn a_peer_that_restarted_unnoticed_has_its_payloads_given_up() {
    let mut script = Script::new(2);
    let client = script.client(1);
    script.ask(client, 2_000_000);
    script.run_until(seconds(5), |script| script.count("sender") == 1);
    // The new agent of machine 0 connects to the frontend before the frontend misses the old one's heartbeats.
    script.fail(Fault::Cut { one: 0, other: 1, pause: ms(400) });
    script.fail(Fault::Kill { machine: 0, pause: ms(100) });
    // 4 s is sooner than the frontend's server would notice by itself that the payload makes no progress.
    script.run_until(seconds(4), |script| script.is_served(client));
    script.end();
}
