//! Information on other machines for the kernel and for programs under `shunt run`: keys of ends, and sources. An *end*
//! is an address of a machine's programs. A *source* is a store that the programs at an end can fetch from. A *store*
//! has the payloads of a machine's programs, and a *reference* names bytes in a store.

use std::collections::HashSet;
use std::net::IpAddr;

use shunt_logic::store::ends::Key;
use shunt_odb::reference::Holder;

use super::Daemon;

impl Daemon {
    /// Tells the kernel the key of an address, so that connections with this address may carry references. The key
    /// proves the TCP handshakes of these connections. `None` removes the address.
    pub(crate) fn set_end(&mut self, address: IpAddr, key: Option<&Key>) {
        let Some(store) = &self.store else { return };
        let told = match key {
            Some(key) => store.kernel.set(address, key),
            None => store.kernel.remove(address),
        };
        if let Err(error) = told {
            tracing::error!(
                %address, %error,
                "cannot add an address of a peer's programs to the kernel's map: these programs get bytes in place of \
                 references"
            );
        }
    }

    /// Tells this machine's programs from which stores the programs at each known address can fetch, and from which
    /// stores they can fetch themselves.
    pub(crate) fn write_sources(&mut self) {
        let (Some(store), Some(logic)) = (&mut self.store, &self.logic.store) else { return };
        let ends = logic.ends.owned();
        let pairs = logic.sources.pairs(&ends).map(|(address, source)| (address, Holder::from(source)));
        let lost = store.sources.known.are(pairs);
        let own: HashSet<Holder> = logic.sources.own().map(Holder::from).collect();
        store.sources.known.own_are(&own);
        if lost > store.sources.lost {
            tracing::warn!(
                lost,
                "too many addresses and stores for the memory that programs read: some programs get bytes in place of \
                 references"
            );
        }
        store.sources.lost = lost;
    }

    /// Tells the logic this machine's addresses, if they have changed.
    pub(crate) fn on_own_addresses(&mut self) {
        let addresses = self.store.as_ref().and_then(|store| store.new_addresses());
        if let Some(addresses) = addresses {
            self.event(|logic, call| logic.set_own_addresses(&addresses, call));
        }
    }
}
