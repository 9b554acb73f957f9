//! Carries out the actions that the logic asks for.

use shunt_handoff::sender::Senders;
use shunt_logic::Action;
use shunt_logic::action::Given;
use shunt_logic::board::Change;
use shunt_wire::peer::Hello;

use super::Daemon;
use super::connections::Welcomed;
use crate::backend::steering::BackendSteering;
use crate::frontend::steering::FrontendSteering;
use crate::kernel::Kernel;

impl Daemon {
    /// Carries out all queued actions, and the actions that these cause.
    pub(super) fn act(&mut self) {
        if std::mem::replace(&mut self.is_acting, true) {
            return;
        }
        while let Some(action) = self.actions.pop() {
            self.do_action(action);
        }
        self.is_acting = false;
        self.fail_ended();
    }

    fn do_action(&mut self, action: Action<Kernel>) {
        match action {
            Action::WriteBoard(change) => self.write_board(change),
            Action::Dial(peer) => self.dial(peer),
            Action::HangUp(peer) => drop(self.links.remove(peer)),
            Action::Tell(server, told) => self.tell_server(server, &told),
            Action::Welcome { server, channel, ring, user, worker, version } => {
                self.welcome(server, &Welcomed { channel, ring, user, worker, version });
            }
            Action::SendStats(server) => self.send_stats(server),
            Action::CloseServer(server) => self.close_server(server),
            Action::CloseRing(ring) => self.for_frontend(|frontend| frontend.remove_ring(ring)),
            Action::Steer(peer) => self.steer(peer),
            Action::WatchRoutes(peer, hello) => self.watch_routes(peer, &hello),
            Action::SetSpacing(peer, spacing) => {
                self.for_frontend(|frontend| frontend.set_spacing(peer as u32, &spacing));
            }
            Action::SetDelivered(peer, word) => {
                self.for_frontend(|frontend| frontend.set_delivered(peer as u32, &word));
            }
            Action::Cancel(region) => self.for_frontend(|frontend| frontend.cancel(&region)),
            Action::Abort(given_up) => self.for_senders(|senders| senders.abort(&given_up)),
            Action::GoOn(withdrawn) => self.go_on_unproven(&withdrawn),
            Action::ForgetPeer(peer) => self.for_senders(|senders| senders.forget_peer(peer)),
            Action::CloseFiles(files) => self.close_files(files),
            Action::BeginFetch { fetch, peer, request } => self.begin_fetch(fetch, peer, &request),
            Action::DeliverFetch { fetch, server, message } => self.deliver_fetch(fetch, server, &message),
            Action::DropFetch(fetch) => drop(self.fetches_out.remove(fetch)),
            Action::ServeFetch { fetch, offer, file, proven } => self.begin_serving(fetch, &offer, file, proven),
            Action::ResetFetch(fetch) => self.reset_fetch(fetch),
            Action::SetEnd(address, key) => self.set_end(address, key.as_ref()),
            Action::WriteSources => self.write_sources(),
        }
    }

    fn for_frontend(&mut self, act: impl FnOnce(&mut FrontendSteering)) {
        if let Some(frontend) = &mut self.kernel.frontend {
            act(frontend);
        }
    }

    fn for_senders(&mut self, act: impl FnOnce(&mut Senders<BackendSteering>)) {
        if let Some(senders) = &mut self.kernel.senders {
            act(senders);
        }
    }

    fn write_board(&mut self, change: Change) {
        if let Err(error) = self.board.write(&self.logic.shared.board, change) {
            tracing::error!(%error, "cannot write the board");
        }
    }

    fn steer(&mut self, peer: usize) {
        let entry = *self.logic.frontend.steered.entry(peer);
        let Some(frontend) = &mut self.kernel.frontend else { return };
        if let Err(error) = frontend.steer(peer as u32, &entry) {
            tracing::error!(%error, peer = self.config.peers[peer].name, "cannot steer to a peer");
        }
    }

    fn watch_routes(&mut self, peer: usize, hello: &Hello) {
        if let Some(uplinks) = &self.uplinks {
            uplinks.watch(peer as u32, [hello.ipv4(), hello.ipv6()]);
        }
    }

    fn go_on_unproven(&mut self, withdrawn: &Given) {
        let senders = self.kernel.senders.as_mut();
        let found = senders.map(|senders| senders.go_on_unproven(withdrawn)).unwrap_or_default();
        found.into_iter().for_each(|sender| self.on_sender(sender));
    }
}
