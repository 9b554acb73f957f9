//! Asks an agent for its counters (`SHUNT_MSG_STATS` of include/shunt.h). `shunt stats`, `shunt doctor` and the lab
//! read them. A *server* is a program that connects to that agent.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;
use shunt_wire::local::{Ended, Header, MAX_STATS_BYTES, Reason, kind};
use zerocopy::{FromBytes, IntoBytes};

/// Longest wait for an answer. An agent that works answers much sooner.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Counters of an agent: the JSON that it answers with.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats(pub Value);

/// Asks the agent that listens at `socket` for its counters.
///
/// # Errors
/// Returns an error if no agent listens there, if the agent refuses this user, or if no readable answer comes in time.
pub fn agent_stats(socket: &Path) -> Result<Stats> {
    agent_stats_within(socket, ANSWER_LIMIT)
}

/// Asks the agent that listens at `socket` for its counters, and waits for the answer for at most `limit`.
///
/// # Errors
/// Returns the errors of [`agent_stats`].
pub fn agent_stats_within(socket: &Path, limit: Duration) -> Result<Stats> {
    let silent = || {
        anyhow!(
            "it does not answer within {limit:?}: it is stopped (`kill -CONT`, with the PID that `systemctl status \
             shuntd` names) or stuck (`systemctl restart shuntd`)"
        )
    };
    let ask = || -> Result<Stats> {
        let agent = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&agent, Timeout::Recv, Some(limit))?;
        // The send timeout also limits connect(2), which waits while the agent accepts no connections.
        set_socket_timeout(&agent, Timeout::Send, Some(limit))?;
        rustix::net::connect(&agent, &SocketAddrUnix::new(socket)?).map_err(|errno| match errno {
            Errno::ACCESS => {
                anyhow!("this user may not connect to its socket: add the user to `observers` in its shuntd.toml")
            }
            Errno::AGAIN => silent(),
            errno => anyhow!(errno)
                .context("connecting (check that shuntd runs, and that this is `socket` of its shuntd.toml)"),
        })?;
        let request = Header { kind: kind::STATS, size: size_of::<Header>() as u32 };
        match rustix::net::send(&agent, request.as_bytes(), SendFlags::NOSIGNAL) {
            Err(Errno::PIPE) => {} // the agent has refused and closed; its answer is in the socket
            sent => drop(sent.context("asking")?),
        }
        let mut answer = vec![0; MAX_STATS_BYTES];
        // With a timeout set, recv(2) also fails with EINTR when a stopped process continues (signal(7)).
        let mut receive =
            || rustix::io::retry_on_intr(|| rustix::net::recv(&agent, &mut answer[..], RecvFlags::empty()));
        let received = match receive() {
            Err(Errno::CONNRESET) => receive(), // the agent closed before it read the request; its answer comes next
            received => received,
        };
        let (length, _) = received.map_err(|errno| match errno {
            Errno::AGAIN => silent(),
            errno => anyhow!(errno).context("receiving"),
        })?;
        Stats::parse(&answer[..length])
    };
    ask().with_context(|| format!("asking the agent at {}", socket.display()))
}

impl Stats {
    fn parse(packet: &[u8]) -> Result<Self> {
        match Header::read_from_prefix(packet) {
            Ok((header, text)) if header.kind == kind::STATS_TEXT => Ok(Self(
                serde_json::from_slice(text)
                    .context("the answer is no JSON: install the same release of shunt and shuntd")?,
            )),
            Ok((header, _)) if header.kind == kind::ENDED => bail!(
                "{}: add this user to `observers` in its shuntd.toml",
                Ended::read_from_bytes(packet)
                    .ok()
                    .and_then(|ended| Reason::from_number(ended.reason))
                    .map_or_else(|| "the agent refuses".to_owned(), |reason| format!("the agent refuses: {reason}"))
            ),
            Ok(_) => bail!("the agent's answer cannot be read: install the same release of shunt and shuntd"),
            Err(_) if packet.is_empty() => bail!("the agent closed the connection"),
            Err(_) => bail!("the agent's answer has {} bytes", packet.len()),
        }
    }

    /// Whether the agent has peers and is connected to each of them.
    #[must_use]
    pub fn all_peers_up(&self) -> bool {
        let peers = self.0["peers"].as_array().map(Vec::as_slice).unwrap_or_default();
        !peers.is_empty() && peers.iter().all(|peer| peer["up"] == Value::Bool(true))
    }

    /// Returns the counter at a path, such as `servers.shortcuts`; 0 if there is none.
    #[must_use]
    pub fn count(&self, path: &str) -> u64 {
        path.split('.').fold(&self.0, |value, key| &value[key]).as_u64().unwrap_or(0)
    }

    /// Returns the answer's counters by their paths, such as `servers.shortcuts`. Those in lists, such as `peers`, are
    /// left out.
    #[must_use]
    pub fn flat(&self) -> BTreeMap<String, u64> {
        let mut flat = BTreeMap::new();
        flatten(&self.0, "", &mut flat);
        flat
    }

    /// Returns, in one line, the counters below `path` that are not 0. `path` is, for example, `servers`; if it is
    /// empty, all counters are meant.
    #[must_use]
    pub fn under(&self, path: &str) -> String {
        let below = |name: &str| path.is_empty() || name.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
        let counted = self.flat().into_iter().filter(|(name, value)| *value > 0 && below(name));
        let counted: Vec<String> = counted.map(|(name, value)| format!("{name} {value}")).collect();
        if counted.is_empty() { "nothing counted".into() } else { counted.join(", ") }
    }

    /// Growth of the counters below `prefix` (such as `servers.`) since `start`, by their names without the prefix.
    /// Counters that have not grown are left out.
    #[must_use]
    pub fn grown(&self, start: &Self, prefix: &str) -> BTreeMap<String, u64> {
        let before = start.flat();
        let grown = self.flat().into_iter().filter_map(|(path, value)| {
            let name = path.strip_prefix(prefix)?.to_owned();
            Some((name, value.saturating_sub(before.get(&path).copied().unwrap_or(0))))
        });
        grown.filter(|(_, growth)| *growth > 0).collect()
    }

    /// Sum of two agents' counters, counter by counter. Everything else is left out.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self(sum(&self.0, &other.0))
    }
}

fn flatten(value: &Value, path: &str, flat: &mut BTreeMap<String, u64>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            flatten(value, &path, flat);
        }),
        Value::Number(number) => flat.extend(number.as_u64().map(|number| (path.to_owned(), number))),
        _ => {}
    }
}

fn sum(one: &Value, other: &Value) -> Value {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let keys = one.keys().chain(other.keys().filter(|key| !one.contains_key(*key)));
            let field = |key: &String| {
                (key.clone(), sum(one.get(key).unwrap_or(&Value::Null), other.get(key).unwrap_or(&Value::Null)))
            };
            Value::Object(keys.map(field).collect())
        }
        (Value::Object(_), _) => sum(one, &Value::Object(serde_json::Map::new())),
        (_, Value::Object(_)) => sum(&Value::Object(serde_json::Map::new()), other),
        _ => match (one.as_u64(), other.as_u64()) {
            (None, None) => Value::Null,
            (one, other) => Value::from(one.unwrap_or(0) + other.unwrap_or(0)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn packet(kind: u32, text: &str) -> Vec<u8> {
        let header = Header { kind, size: (size_of::<Header>() + text.len()) as u32 };
        [header.as_bytes(), text.as_bytes()].concat()
    }

    #[test]
    fn an_agent_that_is_stopped_is_said_to_be() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let agent =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&agent, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&agent, 0).unwrap();
        let ask = || format!("{:#}", agent_stats_within(&socket, Duration::from_millis(10)).unwrap_err());
        // The first connection is queued, and its request gets no answer. The second one finds the queue full.
        for said in [ask(), ask()] {
            assert!(said.contains("does not answer") && said.contains("restart shuntd"), "{said}");
        }
    }

    #[test]
    fn an_answer_is_read() {
        let stats = Stats::parse(&packet(kind::STATS_TEXT, r#"{"servers":{"shortcuts":7}}"#)).unwrap();
        assert_eq!(stats.count("servers.shortcuts"), 7);
        assert_eq!(stats.count("servers.nothing"), 0);
    }

    #[test]
    fn counters_are_said_in_one_line() {
        let stats =
            Stats(json!({"servers": {"shortcuts": 7, "aborted": 0}, "servers_now": 1, "peers": [{"up": true}]}));
        assert_eq!(stats.under("servers"), "servers.shortcuts 7");
        assert_eq!(stats.under(""), "servers.shortcuts 7, servers_now 1");
        assert_eq!(stats.under("backend"), "nothing counted");
    }

    #[test]
    fn other_answers_are_errors() {
        for broken in [vec![], vec![1, 2, 3], packet(kind::WELCOME, "{}"), packet(kind::STATS_TEXT, "{")] {
            assert!(Stats::parse(&broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn all_peers_are_asked() {
        let of = |peers: Value| Stats(json!({ "peers": peers })).all_peers_up();
        assert!(of(json!([{"up": true}, {"up": true}])));
        assert!(!of(json!([{"up": true}, {"up": false}])) && !of(json!([])) && !Stats::default().all_peers_up());
    }

    #[test]
    fn only_what_grew_is_shown() {
        let start = Stats(json!({"servers": {"a": 1, "b": 2}, "agent": {"c": 0}}));
        let end = Stats(json!({"servers": {"a": 1, "b": 5, "d": 4}, "agent": {"c": 9}}));
        let grown: Vec<_> = end.grown(&start, "servers.").into_iter().collect();
        assert_eq!(grown, [("b".to_owned(), 3), ("d".to_owned(), 4)]);
    }

    #[test]
    fn sums_keep_what_either_has() {
        let one = Stats(json!({"name": "fe", "servers": {"a": 1}, "frontend": {"x": 2}, "backend": null}));
        let other = Stats(json!({"name": "be", "servers": {"a": 2, "b": 3}, "frontend": null, "backend": {"y": 4}}));
        let sum = one.plus(&other);
        for (path, value) in [("servers.a", 3), ("servers.b", 3), ("frontend.x", 2), ("backend.y", 4)] {
            assert_eq!(sum.count(path), value, "{path}");
        }
    }
}
