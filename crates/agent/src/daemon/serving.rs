//! Fetches that other agents ask for, each on a separate connection that the other agent has made. A *fetch* brings a
//! payload through both agents to the frontend's server.

use std::fs::File;

use shunt_handoff::identity::FileIdentity;
use shunt_handoff::payload::Payload;
use shunt_handoff::reading::{Done, Owner};
use shunt_wire::local::Offer;
use shunt_wire::peer::{Fetch, Fetched};

use super::Daemon;
use crate::backend::serving::{Serving, Turn};
use crate::os::poll::{Interest, Source};
use crate::peers::arrived::Arrived;

impl Daemon {
    /// Handles another agent's request to fetch a payload on the connection `arrived`.
    pub(crate) fn serve_fetch(&mut self, arrived: Arrived, fetch: &Fetch) {
        let peer = self.config.peer_of(|name| arrived.transport.is_of(name));
        self.serving = Some(arrived);
        let served = self.event(|logic, call| logic.serve_fetch(peer, fetch, call));
        if let (Err(reason), Some(arrived)) = (served, self.serving.take()) {
            arrived.refuse(reason);
        }
    }

    /// Begins to send the payload of a fetch, on the connection that has just asked for it.
    pub(crate) fn begin_serving(&mut self, fetch: usize, offer: &Offer, file: File, proven: Option<FileIdentity>) {
        let Some(Arrived { mut transport, .. }) = self.serving.take() else { return self.close_files(vec![file]) };
        let mut payload = Payload::proven(file, offer, proven);
        Fetched { length: payload.remaining().into() }.emit(transport.output());
        payload.read_by(&self.kernel.reads, Owner::Fetch(fetch));
        self.fetches_in.insert(fetch, Serving { transport, payload });
        self.on_fetch_in(fetch);
    }

    /// Sends more of a fetch whose reader takes bytes.
    pub(crate) fn on_fetch_in(&mut self, fetch: usize) {
        let Some(serving) = self.fetches_in.get_mut(fetch) else { return };
        match serving.turn() {
            Ok(Turn::Done) => {
                self.fetches_in.remove(fetch);
                self.event(|logic, call| logic.served_more(fetch, true, call));
            }
            // A read from disk needs no separate deadline: the fetch's deadline also ends a read that takes too long.
            Ok(Turn::Reading) => {}
            Ok(Turn::Later) => {
                let socket = serving.transport.descriptor();
                let _ = self.poll.set(socket, Source::FetchIn(fetch), Interest::WritableOnce);
                self.event(|logic, call| logic.served_more(fetch, false, call));
            }
            Err(reason) => self.event(|logic, call| logic.served_failed(fetch, reason, call)),
        }
    }

    /// Continues a fetch whose read has ended.
    pub(crate) fn on_fetch_read(&mut self, fetch: usize, done: Done) {
        let Some(serving) = self.fetches_in.get_mut(fetch) else { return };
        match serving.payload.take_read(done) {
            Ok(true) => self.on_fetch_in(fetch),
            Ok(false) => {}
            Err(reason) => self.event(|logic, call| logic.served_failed(fetch, reason, call)),
        }
    }

    /// Resets the connection of a fetch that has failed.
    pub(crate) fn reset_fetch(&mut self, fetch: usize) {
        if let Some(serving) = self.fetches_in.remove(fetch) {
            serving.transport.reset();
        }
    }
}
