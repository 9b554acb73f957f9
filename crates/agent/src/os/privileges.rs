//! Privileges that the agent keeps once it has started (capabilities(7), credentials(7)).
//!
//! Loading and attaching programs, binding sockets to their addresses, and the directory of the Unix socket need root's
//! privileges. The work after the start needs two capabilities. All others are given up, and leave the bounding set,
//! too. This process cannot get them back: no program that it executes could gain them (no_new_privs).

use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{Gid, Uid, User};
use rustix::process::DumpableBehavior;

use shunt_config::accounts::Account;

/// Capabilities that the agent keeps. CAP_NET_ADMIN: TCP_REPAIR, SO_SNDBUFFORCE, programs on interfaces that come
/// later. CAP_BPF: rings of new workers, and maps if the kernel reserves bpf(2) for privileged processes.
const NEEDED: [Capability; 2] = [Capability::CAP_NET_ADMIN, Capability::CAP_BPF];

/// Capabilities that the start needs in any case: those that the agent keeps, and CAP_PERFMON to load programs.
const TO_START: [Capability; 3] = [Capability::CAP_NET_ADMIN, Capability::CAP_BPF, Capability::CAP_PERFMON];

/// Reason why privileges cannot be given up. The agent does not start then.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegesError {
    /// The configuration's `user` does not exist or cannot be used.
    #[error("{0} (`user` in the configuration)")]
    User(String),
    /// This process lacks these capabilities.
    #[error("start it as root, or with the capabilities that docs/shuntd.md lists: it has no {0}")]
    Few(String),
    /// A system call failed.
    #[error(
        "cannot give up privileges: {call}: {error}; start the agent as root, or with the capabilities that \
         docs/shuntd.md lists"
    )]
    Kernel {
        /// The system call.
        call: &'static str,
        /// Its error.
        error: io::Error,
    },
}

fn at<T, E: Into<io::Error>>(call: &'static str, result: Result<T, E>) -> Result<T, PrivilegesError> {
    result.map_err(|error| PrivilegesError::Kernel { call, error: error.into() })
}

fn of_caps<T>(call: &'static str, result: Result<T, caps::errors::CapsError>) -> Result<T, PrivilegesError> {
    at(call, result.map_err(io::Error::other))
}

/// Checks that this process has the capabilities that each start needs. Without this check, an ordinary user would get
/// the error of the first system call that needs one.
///
/// # Errors
/// Returns [`PrivilegesError::Few`] with the missing capabilities, or [`PrivilegesError::Kernel`].
pub fn are_enough() -> Result<(), PrivilegesError> {
    lacking(&of_caps("capget", caps::read(None, CapSet::Effective))?)
}

fn lacking(have: &CapsHashSet) -> Result<(), PrivilegesError> {
    let lacking: Vec<String> = TO_START.iter().filter(|one| !have.contains(one)).map(ToString::to_string).collect();
    if lacking.is_empty() { Ok(()) } else { Err(PrivilegesError::Few(lacking.join(", "))) }
}

/// Gives up all privileges that the agent's work does not need. `user` is the account to become, if the configuration
/// names one.
///
/// # Errors
/// Returns a [`PrivilegesError`]: the user does not exist, or a system call failed.
pub fn give_up(user: Option<&Account>) -> Result<(), PrivilegesError> {
    at("prctl(PR_SET_NO_NEW_PRIVS)", rustix::thread::set_no_new_privs(true))?;
    let needed: CapsHashSet = NEEDED.into_iter().collect();
    let bounding = of_caps("prctl(PR_CAPBSET_READ)", caps::read(None, CapSet::Bounding))?;
    for capability in bounding.difference(&needed) {
        of_caps("prctl(PR_CAPBSET_DROP)", caps::drop(None, CapSet::Bounding, *capability))?;
    }
    if let Some(account) = user {
        become_user(account)?;
    }
    for set in [CapSet::Ambient, CapSet::Inheritable] {
        of_caps("capset", caps::clear(None, set))?;
    }
    of_caps("capset", caps::set(None, CapSet::Effective, &needed))?;
    of_caps("capset", caps::set(None, CapSet::Permitted, &needed))?;
    // Keys pass through this process, so it makes no core dump, and only a process with CAP_SYS_PTRACE may read its
    // memory. This call comes last, because a change of the user resets the setting.
    at("prctl(PR_SET_DUMPABLE)", rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable))
}

/// Gives up all capabilities that are left, for the calling thread only.
///
/// # Errors
/// Returns [`PrivilegesError::Kernel`] if capset(2) fails.
pub fn give_up_all() -> Result<(), PrivilegesError> {
    [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable]
        .into_iter()
        .try_for_each(|set| of_caps("capset", caps::clear(None, set)))
}

/// Becomes the user of `account`, with that user's group and no other. The permitted capabilities stay.
fn become_user(account: &Account) -> Result<(), PrivilegesError> {
    let uid = Uid::from_raw(account.user().map_err(PrivilegesError::User)?);
    let gid = at("getpwuid", User::from_uid(uid))?.map_or(Gid::from_raw(uid.as_raw()), |user| user.gid);
    at("prctl(PR_SET_KEEPCAPS)", rustix::thread::set_keep_capabilities(true))?;
    at("setgroups", nix::unistd::setgroups(&[gid]))?;
    at("setresgid", nix::unistd::setresgid(gid, gid, gid))?;
    at("setresuid", nix::unistd::setresuid(uid, uid, uid))?;
    at("prctl(PR_SET_KEEPCAPS)", rustix::thread::set_keep_capabilities(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_user_is_told_to_start_it_as_root() {
        let said = lacking(&CapsHashSet::new()).unwrap_err().to_string();
        assert!(
            said.starts_with("start it as root") && said.ends_with("CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON"),
            "{said}"
        );
        assert!(lacking(&TO_START.into_iter().collect()).is_ok());
    }
}
