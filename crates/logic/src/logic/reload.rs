//! Change of the settings without a restart. A *peer* is another machine's agent, and a *session* the use of the
//! connection with it. A *store* has the payloads of a machine's programs under `shunt run`.

use shunt_wire::sources::Source;

use super::{Call, Logic};
use crate::action::Action;
use crate::machine::Machine;
use crate::settings::Settings;

impl<M: Machine> Logic<M> {
    /// Takes over changed settings. `settings.peers` begins with the present peers, in their order. A peer that is no
    /// longer configured stays in this list, and is marked as [gone](crate::settings::PeerSettings::is_gone). Sessions
    /// with peers whose settings have changed end, and begin again if they may. Sessions with such peers that are being
    /// opened end, too, because HELLO and the frames after it have told the peer the earlier settings. `stores` has the
    /// names of all peers' stores.
    pub fn reconfigure(&mut self, settings: Settings, stores: &[Source], call: &mut Call<'_, M>) {
        for peer in 0..self.shared.peers.len() {
            let (before, after) = (&self.shared.settings.peers[peer], &settings.peers[peer]);
            if after.is_gone && !before.is_gone {
                self.distrust(peer, "its [[peer]] was removed from the configuration", call);
            } else if !before.allows_session_of(after) && self.shared.peers.is_greeted(peer) {
                self.lose_peer(peer, "its [[peer]] was changed in the configuration", call);
            }
            self.shared.peers.set_address(peer, after.address);
        }
        for (peer, added) in settings.peers.iter().enumerate().skip(self.shared.peers.len()) {
            self.shared.peers.add(added, call.now);
            self.gates.add_peer();
            self.frontend.steered.add();
            call.actions.extend(self.shared.board.add_peer(&added.name).map(Action::WriteBoard));
            if let (Some(store), Some(source)) = (&mut self.store, stores.get(peer)) {
                store.sources.add_peer(*source);
            }
        }
        self.shared.servers.set_limit(settings.limits.servers);
        self.shared.settings = settings;
        self.gates.set_news();
    }
}
