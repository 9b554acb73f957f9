//! Who may use the Unix socket: users and groups of the configuration, by what the kernel says of a process when it
//! connects (SO_PEERCRED, unix(7)). Root and the agent's own user always may.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;

use nix::unistd::{Group, User};
use serde::Deserialize;
use shunt_sys::sockopt::{PeerCredentials, peer_credentials, peer_groups};

/// A user or a group: by name, or by number where the name service knows none.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum Account {
    /// As in `getpwnam(3)` or `getgrnam(3)`.
    Name(String),
    /// uid or gid.
    Number(u32),
}

impl Account {
    /// The uid.
    ///
    /// # Errors
    /// A sentence: there is no such user.
    pub fn user(&self) -> Result<u32, String> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Name(name) => match User::from_name(name) {
                Ok(Some(user)) => Ok(user.uid.as_raw()),
                _ => Err(format!("there is no user \"{name}\" on this machine")),
            },
        }
    }

    /// The gid.
    ///
    /// # Errors
    /// A sentence: there is no such group.
    pub fn group(&self) -> Result<u32, String> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Name(name) => match Group::from_name(name) {
                Ok(Some(group)) => Ok(group.gid.as_raw()),
                _ => Err(format!("there is no group \"{name}\" on this machine")),
            },
        }
    }
}

/// A process that has connected.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The kernel's word.
    pub credentials: PeerCredentials,
    /// What it may do.
    pub may: May,
}

/// What a process may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    /// All that a server does.
    Serve,
    /// Ask for counters.
    Observe,
    /// Nothing.
    Nothing,
}

/// The configuration's users and groups, as numbers.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
    observers: BTreeSet<u32>,
}

impl Callers {
    /// `own`: the user that the agent runs as.
    ///
    /// # Errors
    /// A sentence: a name that this machine does not know.
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

    /// Users and groups that may, for whoever knows of a process its user and effective group alone: members of the groups are
    /// among the users.
    pub fn numbers(&self) -> (Vec<u32>, Vec<u32>) {
        let members = |group: &u32| Group::from_gid((*group).into()).ok().flatten().map(|group| group.mem);
        let members = self.groups.iter().filter_map(members).flatten();
        let members = members.filter_map(|name| Account::Name(name).user().ok());
        (self.users.iter().copied().chain(members).collect(), self.groups.iter().copied().collect())
    }

    /// Whether a process of that user, with these groups, may be a server.
    pub fn may_serve(&self, user: u32, groups: &[u32]) -> bool {
        self.users.contains(&user) || groups.iter().any(|group| self.groups.contains(group))
    }

    /// What whoever is at the other end of `socket` may do.
    ///
    /// # Errors
    /// The kernel's.
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
        Ok(Caller { credentials, may })
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
    fn names_are_looked_up_and_unknown_ones_are_told() {
        assert_eq!(Account::Name("root".into()).user(), Ok(0));
        assert_eq!(Account::Name("root".into()).group(), Ok(0));
        assert_eq!(Account::Number(4242).user(), Ok(4242));
        assert!(Account::Name("no-such-account".into()).user().unwrap_err().contains("no-such-account"));
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
        assert_eq!((own.may, own.credentials.uid), (May::Serve, ours()));
        assert_eq!(own.credentials.pid as u32, std::process::id());
        // Root is always a server, so only another user sees the difference.
        if ours() != 0 {
            let strange = Callers::new(ours() + 1, &[], &[], &[]).unwrap().ask(&socket).unwrap();
            assert_eq!(strange.may, May::Nothing);
            let observer = Callers::new(ours() + 1, &[], &[], &[Account::Number(ours())]).unwrap();
            assert_eq!(observer.ask(&socket).unwrap().may, May::Observe);
        }
    }
}
