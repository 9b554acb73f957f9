//! Counters of one agent. Each is declared only once, here, with its name in `shunt stats` and its meaning. A *fetch*
//! is a payload that comes through two agents to the frontend's server.

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
    sessions_lost: "sessions with peers that were lost",
    strangers: "connections, dialled or accepted, whose other end had no matching certificate",
    incoming_limit: "connections of agents that were refused because too many others had not identified themselves yet",
    malformed_local: "server connections that were closed because of a malformed message",
    malformed_peer: "connections of agents that were refused before their session began",
    refused_callers: "refused server connections of users or groups that are not in the configuration, or have too \
                      many",
    servers_refused: "refused server connections: the limit, or their user's share of it, was reached",
    servers_silent: "server connections that were closed because they never said what they are for",
    rings_exhausted: "workers without a completion ring, because all 512 were taken, or half of them by their user; \
                      they fetch offers",
    unread: "messages that were dropped, because a server had not read thousands of others",
    unasked: "dropped messages of other agents: answers to no question, or more than their handoffs can need",
    offers: "offers taken from servers",
    offers_to_strangers: "offers that were dropped because they were made for a peer that is no longer in the \
                          configuration",
    offers_without_descriptor: "offers that were dropped because descriptors were short",
    offers_expired: "offers that nobody claimed in time",
    handoffs: "handoffs of this machine's servers",
    handoffs_unknown: "refused handoffs: the kernel knew them otherwise, or they were over already",
    claims: "payloads that frontends claimed from this agent",
    claims_waited: "claims of stored bytes that had to wait for a sender or a port",
    declined: "times that another machine's agent refused to send to a client of this machine",
    stalled: "times that a server was told that the payload of a lost agent has stopped",
    proven: "digests of files that were sent to a frontend",
    unproven: "digests of files that could not be given: the file was growing, larger than 1 GiB or replaced, or time \
               ran out",
    aborts: "payloads that frontends gave up",
    fetches_out: "fetches that this machine's servers asked for",
    fetches_in: "fetches that frontends asked this agent for",
    fetches_limited: "fetches that were refused because descriptors were short, in either direction",
    routes_changed: "times that a route to a backend changed or was lost",
    routes_lost: "times that no route led to a backend's address; clients of that IP version are relayed",
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
