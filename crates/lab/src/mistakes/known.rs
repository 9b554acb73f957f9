//! Rows of which it is known that they are not yet as they are to be.

/// A row that fails, and why.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub name: &'static str,
    /// What is seen in place of what is to be.
    pub seen: &'static str,
    /// Whether it fails each time; one that only may is no news when it passes.
    pub always: bool,
}

/// Rows that fail. One that passes is to be taken out: the test says so.
pub const KNOWN: &[Known] = &[
    Known { name: "cgroup-wrong", seen: "nobody says so", always: true },
    Known { name: "heartbeats-differ", seen: "nobody says so", always: true },
    Known { name: "peer-missing", seen: "nobody says so", always: true },
    Known { name: "trust-missing", seen: "only `nginx -t` says so, and the start of nginx", always: true },
    Known { name: "trust-missing-at-backend", seen: "nobody says so", always: true },
    Known { name: "socket-elsewhere", seen: "nobody says so", always: true },
    Known { name: "socket-not-permitted", seen: "nobody says so", always: true },
    Known { name: "plain-intermediate-filters", seen: "shortcuts in place of none", always: false },
    Known { name: "plain-intermediate", seen: "shortcuts in place of none; nobody says so", always: true },
    Known { name: "other-namespace", seen: "nobody says so", always: true },
    Known { name: "other-authority", seen: "nobody says so", always: true },
    Known { name: "agent-ended", seen: "nobody says so", always: true },
    Known {
        name: "backend-interface-wrong",
        seen: "64k: nothing more after 0 bytes; shortcuts in place of none; nobody says so",
        always: true,
    },
    Known {
        name: "no-way-to-clients",
        seen: "64k: reset after 0 bytes; shortcuts in place of none; nobody says so",
        always: true,
    },
    Known {
        name: "router-checks-sources",
        seen: "1m: nothing more after 0 bytes; shortcuts in place of none; nobody says so",
        always: true,
    },
    Known {
        name: "backend-checks-sources",
        seen: "64k: nothing more after 0 bytes; shortcuts in place of none; nobody says so",
        always: true,
    },
    Known { name: "few-fetches", seen: "nobody says so", always: true },
    Known { name: "few-senders", seen: "nobody says so", always: true },
    Known { name: "flow-table-full", seen: "nobody says so", always: true },
];
