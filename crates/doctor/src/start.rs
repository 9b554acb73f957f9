//! Checks for faults that would make the start of an agent fail, or a reload of its certificates. No agent is started
//! for these checks.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Group, Uid, User};

use super::finding::Finding;
use super::host;
use shunt_config::Config;
use shunt_config::accounts::Account;
use shunt_host::holder::holder;
use shunt_host::packets::{self, ListenError};
use shunt_host::sockets::is_ours;

/// Checks accounts, addresses, sockets, the control group, ports, and access to the agent's private key.
pub(crate) fn all(config: &Config) -> Vec<Finding> {
    let mut findings = vec![accounts(config), host::group(config)];
    findings.extend(addresses(config));
    findings.extend(sockets(config));
    findings.extend(host::ports(config));
    findings.extend(config.user.as_ref().and_then(|user| key(user, &config.tls.key)));
    findings
}

/// Checks that this machine has the users and groups that the configuration names.
fn accounts(config: &Config) -> Finding {
    let unknown =
        config.callers().and_then(|_| config.store.as_ref().map_or(Ok(()), |store| config.programs(store).map(drop)));
    let advice = unknown.err().map(|error| format!("{error}; name an existing one, or create it"));
    Finding::of("account", "users and groups of the configuration", advice)
}

/// Checks that sockets can be bound to the configuration's addresses of this machine.
fn addresses(config: &Config) -> Vec<Finding> {
    let listen = [("listen", config.listen)].into_iter();
    let metrics = config.metrics.iter().map(|address| ("metrics", *address));
    let senders = config.backend.iter().flat_map(|backend| &backend.addresses);
    let senders = senders.map(|address| ("[backend] addresses", SocketAddr::new(*address, 0)));
    let of = |(key, address): (&str, SocketAddr)| {
        let advice = is_ours(address).err().map(|error| {
            format!(
                "{error}: the agent cannot start with this address; `ip address` lists the addresses of this machine"
            )
        });
        Finding::of("address", format!("{key}: {}", address.ip()), advice)
    };
    listen.chain(metrics).chain(senders).map(of).collect()
}

/// Checks that an agent could listen at the paths of its Unix sockets. Each path must be short enough, and have neither
/// another kind of file nor another agent's socket.
fn sockets(config: &Config) -> Vec<Finding> {
    let programs = config.store.iter().map(|store| ("[store] socket", &store.socket));
    let of = |(key, path): (&str, &PathBuf)| {
        let usable = packets::is_for_a_socket(path).and_then(|()| is_free(path, &config.pins));
        let advice = usable.err().map(|error| error.to_string());
        Finding::of("socket", key, advice)
    };
    [("socket", &config.socket)].into_iter().chain(programs).map(of).collect()
}

/// Checks that nobody listens at a path, except the agent that runs with this configuration: the one that uses its
/// `pins`. A listener that the kernel does not name counts as that agent, if there is one.
fn is_free(path: &Path, pins: &Path) -> Result<(), ListenError> {
    let Some(listener) = packets::listener(path) else { return Ok(()) };
    let own = holder(pins);
    let is_own = own.is_some() && (listener.process.is_none() || listener.process == own);
    if is_own { Ok(()) } else { Err(ListenError::Taken(path.into(), listener)) }
}

/// Checks that the user that the agent becomes can read the key at `path`, because the agent reads the key again at
/// `systemctl reload`.
fn key(user: &Account, path: &Path) -> Option<Finding> {
    if !path.exists() {
        return None; // the check of the certificate reports that the key is missing
    }
    let user = User::from_uid(Uid::from_raw(user.user().ok()?)).ok()??;
    let about = format!("{} can be read by {}", path.display(), user.name);
    // The user must be able to read the file, and to search each directory above it.
    let in_the_way = path.ancestors().zip(std::iter::once(0o4).chain(std::iter::repeat(0o1)));
    let in_the_way = in_the_way
        .filter(|(path, _)| !path.as_os_str().is_empty())
        .find(|(path, bit)| !may(path, user.uid, user.gid, *bit));
    let advice = in_the_way.map(|(path, _)| {
        let (what, mode) = if path.is_dir() { ("entered", "g+x") } else { ("read", "g+r") };
        let (path, group) = (path.display(), group_name(user.gid));
        format!(
            "{path} cannot be {what} by that user, and `systemctl reload shuntd` would fail: `chgrp {group} {path}`, \
             and `chmod {mode} {path}`"
        )
    });
    Some(Finding::of("certificate", about, advice))
}

/// Returns a group as chgrp(1) takes it: its name, or its id if it has no name.
fn group_name(group: Gid) -> String {
    Group::from_gid(group).ok().flatten().map_or_else(|| group.to_string(), |found| found.name)
}

/// Returns whether the mode of a path lets a user with this one group read it (`bit` 4), or search it (`bit` 1). True
/// where the path cannot be examined, because other checks report that.
fn may(path: &Path, user: Uid, group: Gid, bit: u32) -> bool {
    let Ok(found) = fs::metadata(path) else { return true };
    let granted = if found.uid() == user.as_raw() {
        found.mode() >> 6
    } else if found.gid() == group.as_raw() {
        found.mode() >> 3
    } else {
        found.mode()
    };
    user.is_root() || granted & bit != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn config(more: &str, role: &str) -> Config {
        let text = format!(
            "name = \"be\"\nlisten = \"127.0.0.1:7440\"\n{more}\n[backend]\ninterfaces = [\"lo\"]\n{role}\n[tls]\ncertificate = \"c\"\nkey = \"k\"\nca = \"a\"\n"
        );
        Config::parse(&text, Path::new("x")).unwrap()
    }

    fn faults(more: &str, role: &str) -> Vec<String> {
        let config = config(more, role);
        addresses(&config).into_iter().chain([accounts(&config)]).filter_map(|one| one.fault_line()).collect()
    }

    /// Asserts that a configuration with these lines has exactly one fault, whose text has all of `words`.
    fn is_found(more: &str, role: &str, words: &[&str]) {
        let found = faults(more, role);
        assert!(found.len() == 1 && words.iter().all(|word| found[0].contains(word)), "not {words:?}: {found:?}");
    }

    #[test]
    fn an_address_that_this_machine_lacks_is_named_with_its_key() {
        assert_eq!(faults("metrics = \"127.0.0.1:9440\"", ""), [""; 0]);
        is_found("", "addresses = [\"192.0.2.99\"]", &["[backend] addresses", "192.0.2.99", "ip address"]);
        is_found("metrics = \"192.0.2.98:9440\"", "", &["metrics", "192.0.2.98"]);
    }

    #[test]
    fn a_socket_in_a_files_place_is_named_with_its_key() {
        let directory = tempfile::tempdir().unwrap();
        let [file, free] = ["shuntd.toml", "none/s"].map(|name| directory.path().join(name));
        fs::write(&file, "").unwrap();
        let of = |servers: &Path, programs: &Path| -> Vec<String> {
            let config = config(&format!("socket = {servers:?}"), &format!("[store]\nsocket = {programs:?}"));
            sockets(&config).iter().filter_map(Finding::fault_line).collect()
        };
        let fault = |key: &str| format!("socket: {key}: {} exists and is no socket: name another path", file.display());
        assert_eq!(of(&free, &directory.path().join("store")), [""; 0]);
        assert_eq!(of(&file, &free), [fault("socket")]);
        assert_eq!(of(&free, &file), [fault("[store] socket")]);
    }

    #[test]
    fn another_agents_socket_is_a_fault_and_the_own_one_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let [path, pins] = ["s", "pins"].map(|name| directory.path().join(name));
        fs::create_dir(&pins).unwrap();
        let config = config(&format!("socket = {path:?}\npins = {pins:?}"), "");
        let faults = || -> Vec<String> { sockets(&config).iter().filter_map(Finding::fault_line).collect() };
        let _listens = packets::listen(&path, None, false).unwrap();
        let said = format!("socket: socket: an agent (process {}) listens at {}", std::process::id(), path.display());
        assert!(matches!(&faults()[..], [one] if one.starts_with(&said)), "{:?}", faults());
        // The agent that has this configuration holds the lock on its pins.
        let lock = fs::File::open(&pins).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert_eq!(faults(), [""; 0]);
    }

    #[test]
    fn an_account_that_nobody_knows_is_named_with_its_key() {
        for key in ["users", "groups", "observers"] {
            is_found(&format!("{key} = [\"no-such-account\"]"), "", &[key, "no-such-account"]);
        }
        is_found("user = \"no-such-account\"", "", &["user: ", "no-such-account"]);
    }

    #[test]
    fn a_key_is_to_be_given_to_a_group_that_the_user_is_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        // On Debian, the group of the user `nobody` is not called `nobody`.
        let nobody = User::from_name("nobody").unwrap().unwrap();
        let group = Group::from_gid(nobody.gid).unwrap().unwrap().name;
        let line = key(&Account::Name("nobody".into()), &path).unwrap().fault_line().unwrap();
        let advice = format!("{at} cannot be read by that user, and", at = path.display());
        assert!(line.contains(&advice) && line.contains("`chmod g+r "), "{line}");
        assert!(line.contains(&format!("`chgrp {group} {}`", path.display())), "{line}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let line = key(&Account::Name("nobody".into()), &path).unwrap().fault_line().unwrap();
        assert!(line.contains("cannot be entered by that user") && line.contains("`chmod g+x "), "{line}");
        assert_eq!(group_name(Gid::from_raw(4_242_424)), "4242424");
    }

    #[test]
    fn a_key_is_read_by_its_owner_its_group_or_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, "").unwrap();
        let found = fs::metadata(&path).unwrap();
        let (own, other) = (found.uid(), Uid::from_raw(found.uid() + 4242));
        let (group, strange) = (Gid::from_raw(found.gid()), Gid::from_raw(found.gid() + 4242));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(may(&path, Uid::from_raw(own), strange, 4) && may(&path, other, group, 4));
        assert!(!may(&path, other, strange, 4));
    }
}
