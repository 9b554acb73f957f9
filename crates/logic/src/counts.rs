//! Counters of one agent. Each is declared only once, here, with its name in `shunt stats` and its meaning.

use shunt_wire::local::Reason;

macro_rules! counts {
    ($($name:ident: $meaning:literal,)*) => {
        /// Events in this agent since it started.
        #[derive(Clone, Debug)]
        pub struct Counts {
            $(#[doc = $meaning] pub $name: u64,)*
            /// Handoffs and fetches that ended without success, by the number of their [`Reason`].
            pub ended: [u64; Reason::ALL.len() + 1],
        }

        impl Default for Counts {
            fn default() -> Self {
                Self { $($name: 0,)* ended: [0; Reason::ALL.len() + 1] }
            }
        }

        impl Counts {
            /// Names and meanings of all counters except those in `ended`.
            pub const MEANINGS: &'static [(&'static str, &'static str)] = &[$((stringify!($name), $meaning),)*];

            /// Returns names and values, in the order of [`Counts::MEANINGS`].
            pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

counts! {
    sessions: "sessions with peers that began",
    sessions_lost: "of those, lost",
    strangers: "connections, made or taken, whose other end had no certificate that fits",
    incoming_limit: "connections of agents that found no place: too many had not said what they are",
    malformed_local: "server connections that were closed for a message that makes no sense",
    malformed_peer: "agent connections that were refused before their session",
    refused_callers: "server connections of users or groups that are not in the configuration, or too many of one",
    servers_refused: "server connections beyond the limit, or beyond what their user may have of it",
    servers_silent: "server connections that never said what they are for",
    rings_exhausted: "workers without a completion ring, all 512 being taken, or half of them by their user: they fetch what is offered",
    unread: "messages that a server did not take, its socket being full",
    unasked: "messages of other agents that were dropped: answers to no question, or more than their handoffs can have",
    offers: "offers taken from servers",
    offers_to_strangers: "of those, dropped: made to a peer that is not trusted any more",
    offers_without_descriptor: "offers dropped for want of descriptors",
    offers_expired: "offers that nobody claimed in time",
    handoffs: "handoffs of this machine's servers",
    handoffs_unknown: "of those, refused: not as the kernel knows them, or over already",
    claims: "payloads that frontends claimed here",
    claims_waited: "of those, of bytes of the store: had to wait until more could be sent",
    declined: "times that another machine's agent said that it does not send to a client of this one's, or not now",
    stalled: "times that a server was told of a lost agent's payload that comes no further",
    proven: "times that a file's digest was told to a frontend",
    unproven: "times that a file's digest could not be told: growing, larger than 1 GiB, replaced, or not in time",
    aborts: "payloads that frontends gave up",
    fetches_out: "fetches that this machine's servers asked for",
    fetches_in: "fetches that frontends asked for here",
    fetches_limited: "fetches refused for want of a descriptor, in either direction",
    routes_changed: "times that a route to a backend became another one, or none",
    routes_lost: "times that there was no route to an address of a backend: clients of that IP version are relayed",
}

impl Counts {
    /// Counts the end of a handoff or fetch.
    pub fn end(&mut self, reason: Reason) {
        self.ended[reason as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_names_of_their_fields() {
        let counts = Counts { claims: 7, ..Counts::default() };
        let found: Vec<_> = counts.values().filter(|(_, value)| *value != 0).collect();
        assert_eq!(found, [("claims", 7)]);
        assert_eq!(counts.values().count(), Counts::MEANINGS.len());
    }
}
