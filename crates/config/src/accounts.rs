//! Users and groups in the configuration.

use nix::unistd::{Group, User};
use serde::Deserialize;

/// A user or a group, given by its name or by its id.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum Account {
    /// Name, as `getpwnam(3)` or `getgrnam(3)` takes it.
    Name(String),
    /// User id or group id.
    Number(u32),
}

impl Account {
    /// Returns the account's user id.
    ///
    /// # Errors
    /// Returns a sentence for the operator if there is no such user.
    pub fn user(&self) -> Result<u32, String> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Name(name) => match User::from_name(name) {
                Ok(Some(user)) => Ok(user.uid.as_raw()),
                _ => Err(format!("there is no user \"{name}\" on this machine")),
            },
        }
    }

    /// Returns the account's group id.
    ///
    /// # Errors
    /// Returns a sentence for the operator if there is no such group.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_and_unknown_ones_are_told() {
        assert_eq!(Account::Name("root".into()).user(), Ok(0));
        assert_eq!(Account::Name("root".into()).group(), Ok(0));
        assert_eq!(Account::Number(4242).user(), Ok(4242));
        assert!(Account::Name("no-such-account".into()).user().unwrap_err().contains("no-such-account"));
    }
}
