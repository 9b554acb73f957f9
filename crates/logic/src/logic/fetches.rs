//! Fetches: payloads that do not go straight to the client, but through both agents to the frontend's server. A *peer*
//! is another machine's agent.

use shunt_wire::local::Reason;
use shunt_wire::peer::{Fetch, Frame};

use super::{Call, Logic};
use crate::machine::Machine;

impl<M: Machine> Logic<M> {
    /// Begins a fetch that another agent asks for. `peer` is the peer that the other agent's certificate belongs to, if
    /// any. Returns the fetch's number.
    ///
    /// # Errors
    /// Returns why the fetch is refused.
    pub fn serve_fetch(&mut self, peer: Option<usize>, fetch: &Fetch, call: &mut Call<'_, M>) -> Result<usize, Reason> {
        let served = self.with(call, |_, backend, turn| backend.serve(peer, fetch, turn))?;
        self.note_fetch(peer);
        Ok(served)
    }

    /// Notes that a peer has taken bytes of its fetch. `is_done` says that these were the last ones.
    pub fn served_more(&mut self, fetch: usize, is_done: bool, call: &Call<'_, M>) {
        self.backend.served_more(fetch, is_done, call.now);
    }

    /// Fails a peer's fetch.
    pub fn served_failed(&mut self, fetch: usize, reason: Reason, call: &mut Call<'_, M>) {
        self.with(call, |_, backend, turn| backend.fail_served(fetch, reason, turn));
    }

    /// Handles a backend's answer to a fetch of this machine.
    pub fn fetch_answered(&mut self, fetch: usize, frame: &Frame, call: &mut Call<'_, M>) {
        self.with(call, |frontend, _, turn| frontend.fetches.answered(fetch, frame, turn));
    }

    /// Fails a fetch, because its server could not be given the descriptor from which it reads the payload. `name` is
    /// the number that the server itself has given to the fetch.
    pub fn fetch_undelivered(
        &mut self,
        fetch: usize,
        server: usize,
        name: u64,
        reason: Reason,
        call: &mut Call<'_, M>,
    ) {
        self.with(call, |frontend, _, turn| frontend.fetches.undelivered(fetch, server, name, reason, turn));
    }

    /// Notes that bytes of a fetch have been passed on to the server. `is_done` says that these were the last ones.
    pub fn fetch_moved(&mut self, fetch: usize, is_done: bool, call: &Call<'_, M>) {
        self.frontend.fetches.moved(fetch, is_done, call.now);
    }

    /// Fails a fetch of this machine.
    pub fn fetch_failed(&mut self, fetch: usize, reason: Reason, call: &mut Call<'_, M>) {
        self.with(call, |frontend, _, turn| frontend.fetches.fail(fetch, reason, turn));
    }
}
