//! Rows of which it is known that they are not yet as they are to be.

/// A row that fails, and why.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub name: &'static str,
    /// What is seen in place of what is to be.
    pub seen: &'static str,
}

/// Rows that fail. One that passes is to be taken out: the test says so.
pub const KNOWN: &[Known] = &[
    Known {
        name: "interface-wrong",
        seen: "64k: nothing more after 15928 bytes; shortcuts in place of none; nobody says so",
    },
    Known { name: "cgroup-wrong", seen: "nobody says so" },
    Known { name: "listens-elsewhere", seen: "nobody says so" },
    Known { name: "heartbeats-differ", seen: "nobody says so" },
    Known { name: "speaks-for-missing", seen: "64k: reset after 0 bytes; shortcuts in place of none; nobody says so" },
    Known {
        name: "speaks-for-other-port",
        seen: "64k: reset after 0 bytes; shortcuts in place of none; nobody says so",
    },
    Known { name: "peer-name-wrong", seen: "nobody says so" },
    Known { name: "peer-missing", seen: "nobody says so" },
    Known { name: "peer-address-nobodys", seen: "nobody says so" },
    Known { name: "peer-port-wrong", seen: "nobody says so" },
    Known { name: "trust-missing", seen: "64k: error 502; nobody says so" },
    Known { name: "trust-missing-at-backend", seen: "nobody says so" },
    Known { name: "socket-elsewhere", seen: "nobody says so" },
    Known { name: "socket-not-permitted", seen: "nobody says so" },
    Known { name: "plain-intermediate-filters", seen: "shortcuts in place of none" },
    Known { name: "plain-intermediate", seen: "shortcuts in place of none; nobody says so" },
    Known { name: "other-namespace", seen: "nobody says so" },
    Known { name: "other-authority", seen: "nobody says so" },
    Known { name: "key-of-another", seen: "nobody says so" },
    Known { name: "agent-ended", seen: "nobody says so" },
    Known { name: "detached", seen: "no shortcut; nobody says so" },
    Known { name: "detached-by-another", seen: "64k: nothing more after 15928 bytes; nobody says so" },
    Known { name: "second-agent", seen: "it starts" },
    Known { name: "interface-made-anew", seen: "64k: nothing more after 15928 bytes; nobody says so" },
    Known {
        name: "backend-interface-wrong",
        seen: "64k: nothing more after 0 bytes; shortcuts in place of none; nobody says so",
    },
    Known { name: "port-blackholed", seen: "nobody says so" },
    Known { name: "no-way-to-clients", seen: "64k: reset after 0 bytes; shortcuts in place of none; nobody says so" },
    Known {
        name: "router-checks-sources",
        seen: "64k: nothing more after 0 bytes; shortcuts in place of none; nobody says so",
    },
    Known {
        name: "backend-checks-sources",
        seen: "64k: nothing more after 0 bytes; shortcuts in place of none; nobody says so",
    },
    Known { name: "redirect", seen: "64k: reset after 0 bytes; shortcuts in place of none; nobody says so" },
    Known { name: "destination-nat", seen: "64k: reset after 0 bytes; shortcuts in place of none; nobody says so" },
    Known { name: "few-fetches", seen: "64k: error 502" },
    Known { name: "few-senders", seen: "nobody says so" },
    Known { name: "flow-table-full", seen: "nobody says so" },
];
