//! What the agent may do once it has started (capabilities(7), credentials(7)).
//!
//! Loading and attaching programs, sockets at their addresses and the directory of the Unix socket take root's power;
//! the work after that takes two capabilities. The rest is given up for good, bounding set included, and no program
//! that is started from here could gain it again (no_new_privs).

use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use nix::unistd::{Gid, Uid, User};
use rustix::process::DumpableBehavior;

use crate::callers::Account;

/// CAP_NET_ADMIN: TCP_REPAIR, SO_SNDBUFFORCE, programs on interfaces that come later. CAP_BPF: rings of new workers, and maps where the kernel keeps bpf(2) for
/// the privileged.
const NEEDED: [Capability; 2] = [Capability::CAP_NET_ADMIN, Capability::CAP_BPF];

/// Why privileges cannot be given up. The agent does not work then.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegesError {
    /// The configuration's.
    #[error("{0} (`user` in the configuration)")]
    User(String),
    /// The kernel's.
    #[error("cannot give up privileges: {call}: {error}; start it as root, or with the capabilities of docs/shuntd.md")]
    Kernel {
        /// What was asked.
        call: &'static str,
        /// Its answer.
        error: io::Error,
    },
}

fn at<T, E: Into<io::Error>>(call: &'static str, result: Result<T, E>) -> Result<T, PrivilegesError> {
    result.map_err(|error| PrivilegesError::Kernel { call, error: error.into() })
}

fn of_caps<T>(call: &'static str, result: Result<T, caps::errors::CapsError>) -> Result<T, PrivilegesError> {
    at(call, result.map_err(io::Error::other))
}

/// Gives up all that the work does not need. `user`: whom to become, where this is root.
///
/// # Errors
/// See [`PrivilegesError`].
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
    // Keys pass through this process: no core dump, and nobody without CAP_SYS_PTRACE looks into it. Last, for the kernel
    // sets it anew with the user.
    at("prctl(PR_SET_DUMPABLE)", rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable))
}

/// Gives up what the calling thread has left, alone.
///
/// # Errors
/// See [`PrivilegesError`].
pub fn give_up_all() -> Result<(), PrivilegesError> {
    [CapSet::Effective, CapSet::Permitted, CapSet::Inheritable]
        .into_iter()
        .try_for_each(|set| of_caps("capset", caps::clear(None, set)))
}

/// The user, and its group alone. Capabilities stay permitted.
fn become_user(account: &Account) -> Result<(), PrivilegesError> {
    let uid = Uid::from_raw(account.user().map_err(PrivilegesError::User)?);
    let gid = at("getpwuid", User::from_uid(uid))?.map_or(Gid::from_raw(uid.as_raw()), |user| user.gid);
    at("prctl(PR_SET_KEEPCAPS)", rustix::thread::set_keep_capabilities(true))?;
    at("setgroups", nix::unistd::setgroups(&[gid]))?;
    at("setresgid", nix::unistd::setresgid(gid, gid, gid))?;
    at("setresuid", nix::unistd::setresuid(uid, uid, uid))?;
    at("prctl(PR_SET_KEEPCAPS)", rustix::thread::set_keep_capabilities(false))
}
