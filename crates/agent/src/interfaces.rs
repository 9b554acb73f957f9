//! The interfaces that the configuration names, looked at before programs are put on them that read Ethernet frames
//! and must see each packet once.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use shunt_sys::netns::detached_sysfs;

use crate::host;

/// ARPHRD_ETHER (include/uapi/linux/if_arp.h). Tunnels of IP packets and loopback have others.
const ETHERNET: u32 = 1;

/// Why steering cannot be put on an interface.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// It is not there.
    #[error("interface \"{name}\": {error}; `ip link` lists those that are there")]
    Missing {
        /// Its name.
        name: String,
        /// The kernel's answer.
        error: io::Error,
    },
    /// Its packets have no Ethernet header.
    #[error("interface \"{name}\" is not Ethernet (ARPHRD type {kind}): name the Ethernet port that its packets pass")]
    NotEthernet {
        /// Its name.
        name: String,
        /// ARPHRD_*.
        kind: u32,
    },
    /// What passes one passes the other, too: VLANs, macvlan, bridges, bonds.
    #[error(
        "interfaces \"{upper}\" and \"{lower}\" are both named and one lies on the other, so that each packet would be \
         translated twice: name one of them"
    )]
    Stacked {
        /// The one whose packets pass the other.
        upper: String,
        /// The other.
        lower: String,
    },
}

/// Their indices.
///
/// # Errors
/// See [`InterfaceError`].
pub fn indices(names: &[String]) -> Result<Vec<u32>, InterfaceError> {
    let sysfs = Sysfs::open();
    names.iter().map(|name| sysfs.index(name, names)).collect()
}

/// Indices of those that are there now; the others may come later (ports.rs).
///
/// # Errors
/// See [`InterfaceError`].
pub fn present(names: &[String]) -> Result<Vec<u32>, InterfaceError> {
    let sysfs = Sysfs::open();
    let index = |name: &String| match sysfs.index(name, names) {
        Err(InterfaceError::Missing { .. }) => None,
        found => Some(found),
    };
    names.iter().filter_map(index).collect()
}

/// Every interface that there is now, by its index: whether what leaves by it passes one of those that are named, on which
/// it may lie.
pub fn covered(names: &[String]) -> BTreeMap<u32, bool> {
    let sysfs = Sysfs::open();
    let all = fs::read_dir(&sysfs.directory).into_iter().flatten().flatten();
    let all = all.filter_map(|entry| entry.file_name().into_string().ok());
    let is_covered =
        |name: &String| names.contains(name) || sysfs.all_below(name).iter().any(|one| names.contains(one));
    all.filter_map(|name| {
        let index = host::interface_index(&name).ok()?;
        // /sys may be of another network namespace, which tells nothing about this one's.
        (sysfs.number(&name, "ifindex") == Some(index)).then(|| (index, is_covered(&name)))
    })
    .collect()
}

/// Whether an interface is up; `None` where `/sys` does not tell.
pub fn is_up(name: &str) -> Option<bool> {
    let flags = fs::read_to_string(Sysfs::open().directory.join(name).join("flags")).ok()?;
    let flags = u32::from_str_radix(flags.trim().strip_prefix("0x")?, 16).ok()?;
    Some(flags & libc::IFF_UP as u32 != 0)
}

/// MTU of the interface that has this address, in bytes.
pub fn mtu_at(address: IpAddr) -> Option<u32> {
    let at = if_addrs::get_if_addrs().ok()?.into_iter().find(|interface| interface.ip() == address)?;
    Sysfs::open().number(&at.name, "mtu")
}

/// The interfaces of this network namespace (Documentation/ABI/testing/sysfs-class-net).
#[derive(Debug)]
pub(crate) struct Sysfs {
    directory: PathBuf,
    _mount: Option<OwnedFd>,
}

impl Sysfs {
    /// `/sys` is of the namespace in which it was mounted. To mount another takes CAP_SYS_ADMIN, which an agent need
    /// not have.
    pub(crate) fn open() -> Self {
        let mount = detached_sysfs().ok();
        let root = mount.as_ref().map_or("/sys".into(), |mount| format!("/proc/thread-self/fd/{}", mount.as_raw_fd()));
        Self { directory: Path::new(&root).join("class/net"), _mount: mount }
    }

    /// Index of an interface that programs can be put on, among those that are `named`.
    pub(crate) fn index(&self, name: &str, named: &[String]) -> Result<u32, InterfaceError> {
        let missing = |error| InterfaceError::Missing { name: name.into(), error };
        let index = host::interface_index(name).map_err(missing)?;
        if self.number(name, "ifindex") == Some(index) {
            self.check(name, named)?;
        } else {
            tracing::warn!(interface = name, "/sys is of another network namespace: cannot tell what it lies on");
        }
        Ok(index)
    }

    fn number(&self, name: &str, attribute: &str) -> Option<u32> {
        fs::read_to_string(self.directory.join(name).join(attribute)).ok()?.trim().parse().ok()
    }

    fn check(&self, name: &str, named: &[String]) -> Result<(), InterfaceError> {
        if let Some(kind) = self.number(name, "type").filter(|kind| *kind != ETHERNET) {
            return Err(InterfaceError::NotEthernet { name: name.into(), kind });
        }
        match self.all_below(name).into_iter().find(|lower| named.contains(lower)) {
            Some(lower) => Err(InterfaceError::Stacked { upper: name.into(), lower }),
            None => Ok(()),
        }
    }

    /// What its packets pass, too: directly, or by way of another.
    fn all_below(&self, name: &str) -> Vec<String> {
        let mut all = self.directly_below(name);
        let mut next = 0;
        while let Some(name) = all.get(next) {
            let below = self.directly_below(name);
            all.extend(below);
            next += 1;
        }
        all
    }

    fn directly_below(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.directory.join(name)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| name.strip_prefix("lower_").map(str::to_owned)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_sys::netns::Netns;
    use std::process::Command;

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    /// The answers in a new network namespace, made by these `ip` commands.
    fn answers(made_by: &[&str], cases: &[&[&str]]) -> Vec<Result<usize, String>> {
        let name = format!("shunt-interfaces-{}", std::process::id());
        ip(&format!("netns add {name}"));
        made_by.iter().for_each(|command| ip(&format!("-n {name} {command}")));
        let answer = |names: &&[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            indices(&names).map(|indices| indices.len()).map_err(|error| error.to_string())
        };
        let answers = Netns::named(&name).unwrap().run(|| cases.iter().map(answer).collect()).unwrap();
        ip(&format!("netns del {name}"));
        answers
    }

    #[test]
    fn what_is_not_ethernet_or_lies_on_another_is_refused() {
        if !shunt_testbed::root() {
            return;
        }
        let made_by = [
            "link add eth0 type veth peer name eth1",
            "link add upper0 link eth0 type macvlan",
            "link add bridge0 type bridge",
            "link set upper0 master bridge0",
            "tuntap add tun0 mode tun",
        ];
        let cases: [&[&str]; 7] = [
            &["eth0", "eth1"],
            &["upper0"],
            &["bridge0", "eth1"],
            &["lo"],
            &["eth0", "tun0"],
            &["upper0", "eth0"],
            &["eth0", "bridge0"],
        ];
        let answers = answers(&made_by, &cases);
        assert_eq!(answers[..3], [Ok(2), Ok(1), Ok(2)]);
        let refused: Vec<&str> = answers[3..].iter().map(|answer| answer.as_ref().unwrap_err().as_str()).collect();
        let stacked = |upper, lower| {
            InterfaceError::Stacked { upper: str::to_owned(upper), lower: str::to_owned(lower) }.to_string()
        };
        assert_eq!(
            refused[0],
            "interface \"lo\" is not Ethernet (ARPHRD type 772): name the Ethernet port that its packets pass"
        );
        assert!(refused[1].starts_with("interface \"tun0\" is not Ethernet (ARPHRD type 65534)"), "{}", refused[1]);
        assert_eq!(refused[2..], [stacked("upper0", "eth0"), stacked("bridge0", "eth0")]);
    }

    #[test]
    fn an_interface_that_is_not_there_yet_is_passed_over_and_one_that_cannot_be_used_is_not() {
        assert_eq!(present(&["no-such-port".into()]).unwrap(), Vec::<u32>::new());
        let names = ["no-such-port".into(), "lo".into()];
        assert!(matches!(present(&names), Err(InterfaceError::NotEthernet { .. })));
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        let error = indices(&["no-such-port".into()]).unwrap_err().to_string();
        assert!(error.starts_with("interface \"no-such-port\": ") && error.ends_with("that are there"), "{error}");
    }
}
