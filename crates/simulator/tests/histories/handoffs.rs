//! Handoffs whose backend, frontend, or session is lost in the middle of the payload. A *payload* is the body of a
//! response. A *handoff* lets a backend send a payload on a client's connection. A *session* is the use of a connection
//! between two agents.

use shunt_simulator::{Fault, Script};

use super::{ms, seconds};

/// Length of a payload, in bytes. A backend's kernel does not take so many bytes from its agent at once, so a killed
/// agent leaves a part unsent.
const LONG: u64 = 2_000_000;

fn with_a_payload_under_way(frontend: usize) -> (Script, usize) {
    let mut script = Script::new(2);
    let client = script.client(frontend);
    script.ask(client, LONG);
    script.run_until(seconds(5), |script| script.count("sender") == 1);
    (script, client)
}

#[test]
fn a_payload_of_a_machine_that_is_cut_off_is_given_up_within_four_seconds() {
    let (mut script, client) = with_a_payload_under_way(0);
    script.fail(Fault::Cut { one: 0, other: 1, pause: seconds(60) });
    script.run_until(seconds(4), |script| script.is_served(client));
    assert_eq!(script.count("region taken"), 1);
}

#[test]
fn an_agent_that_starts_anew_ends_what_its_predecessor_left() {
    let (mut script, client) = with_a_payload_under_way(0);
    script.fail(Fault::Kill { machine: 1, pause: seconds(20) });
    script.fail(Fault::Kill { machine: 0, pause: ms(50) });
    script.run_until(seconds(8), |script| script.is_served(client));
    script.run(seconds(20));
    script.end();
}
