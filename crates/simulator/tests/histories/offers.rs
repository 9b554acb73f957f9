//! Offers (payloads that a backend's server holds ready), made just before the backend's session with the frontend is
//! lost. A *session* is the use of a connection between two agents.

use shunt_simulator::{Fault, Script};

use super::{ms, seconds};

#[test]
fn an_offer_that_its_agent_reads_after_the_session_is_lost_is_kept() {
    let mut script = Script::new(2);
    let client = script.client(0);
    // The backend's agent reads no offer before the session is lost.
    script.fail(Fault::Stop { machine: 1, pause: ms(100) });
    script.ask(client, 200_000);
    script.run_until(seconds(3), |script| script.count("offer") == 1);
    script.fail(Fault::Reset { one: 0, other: 1 });
    script.run(ms(200));
    let backend = script.logic(1);
    assert_eq!((backend.shared.counts.offers_to_strangers, backend.backend.offers.len()), (0, 1));
    script.run_until(seconds(5), |script| script.is_served(client));
    script.end();
}
