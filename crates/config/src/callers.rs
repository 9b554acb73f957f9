//! Access control of the agent's Unix socket, by the users and groups that the configuration names. The kernel tells
//! the agent the user and groups of each process that connects (SO_PEERCRED, SO_PEERGROUPS, unix(7)). Root and the
//! agent's own user are always allowed.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;

use nix::unistd::Group;
use shunt_logic::servers::{Caller, May};
use shunt_sys::sockopt::{PeerCredentials, peer_credentials, peer_groups};

use crate::accounts::Account;

/// Users and groups that the configuration allows, by their ids.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
    observers: BTreeSet<u32>,
}

impl Callers {
    /// Looks up the ids of the configured names. `own` is the id of the user that the agent runs as.
    ///
    /// # Errors
    /// Returns a sentence that names the key if this machine does not know one of the names.
    pub fn new(own: u32, users: &[Account], groups: &[Account], observers: &[Account]) -> Result<Self, String> {
        let numbers = |key: &str, accounts: &[Account], number: fn(&Account) -> Result<u32, String>| {
            let all: Result<BTreeSet<u32>, String> = accounts.iter().map(number).collect();
            all.map_err(|error| format!("{key}: {error}"))
        };
        let mut users = numbers("users", users, Account::user)?;
        users.extend([0, own]);
        let groups = numbers("groups", groups, Account::group)?;
        Ok(Self { users, groups, observers: numbers("observers", observers, Account::user)? })
    }

    /// Returns the ids of the users and groups whose processes may be servers. They are for a check in BPF that sees
    /// only a process's real user and real group (bpf_get_current_uid_gid), and no supplementary groups. So the members
    /// of the groups are listed as users, too.
    pub fn numbers(&self) -> (Vec<u32>, Vec<u32>) {
        let members = |group: &u32| Group::from_gid((*group).into()).ok().flatten().map(|group| group.mem);
        let members = self.groups.iter().filter_map(members).flatten();
        let members = members.filter_map(|name| Account::Name(name).user().ok());
        (self.users.iter().copied().chain(members).collect(), self.groups.iter().copied().collect())
    }

    /// Returns whether a process of this user, with these groups, may be a server.
    pub fn may_serve(&self, user: u32, groups: &[u32]) -> bool {
        self.users.contains(&user) || groups.iter().any(|group| self.groups.contains(group))
    }

    /// Returns who is at the other end of `socket`, and what that process may do.
    ///
    /// # Errors
    /// Returns the kernel's error of getsockopt(2) (SO_PEERCRED, SO_PEERGROUPS).
    pub fn ask(&self, socket: impl AsFd) -> io::Result<Caller> {
        let credentials = peer_credentials(&socket)?;
        let in_group = || -> io::Result<bool> {
            if self.groups.is_empty() {
                return Ok(false);
            }
            Ok(self.groups.contains(&credentials.gid)
                || peer_groups(&socket)?.iter().any(|group| self.groups.contains(group)))
        };
        let may = if self.users.contains(&credentials.uid) || in_group()? {
            May::Serve
        } else if self.observers.contains(&credentials.uid) {
            May::Observe
        } else {
            May::Nothing
        };
        let PeerCredentials { pid, uid, gid } = credentials;
        Ok(Caller { pid, uid, gid, may })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn ours() -> u32 {
        rustix::process::getuid().as_raw()
    }

    #[test]
    fn an_error_about_an_unknown_name_has_its_key() {
        let unknown = [Account::Name("no-such-account".into())];
        for (key, callers) in [
            ("users", Callers::new(0, &unknown, &[], &[])),
            ("groups", Callers::new(0, &[], &unknown, &[])),
            ("observers", Callers::new(0, &[], &[], &unknown)),
        ] {
            assert!(callers.unwrap_err().starts_with(key), "{key}");
        }
    }

    #[test]
    fn the_kernel_says_who_it_is() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let own = Callers::new(ours(), &[], &[], &[]).unwrap().ask(&socket).unwrap();
        assert_eq!((own.may, own.uid), (May::Serve, ours()));
        assert_eq!(own.pid as u32, std::process::id());
        // Root may always be a server, so only another user can be refused.
        if ours() != 0 {
            let strange = Callers::new(ours() + 1, &[], &[], &[]).unwrap().ask(&socket).unwrap();
            assert_eq!(strange.may, May::Nothing);
            let observer = Callers::new(ours() + 1, &[], &[], &[Account::Number(ours())]).unwrap();
            assert_eq!(observer.ask(&socket).unwrap().may, May::Observe);
        }
    }
}
