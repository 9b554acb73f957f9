//! Checks of the interfaces that the configuration names, before the agent attaches steering programs (BPF) to them.
//! The programs read Ethernet frames, and must see each packet only once.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shunt_sys::netns::detached_sysfs;

/// Type of an Ethernet interface, ARPHRD_ETHER (include/uapi/linux/if_arp.h). Loopback and tunnels of IP packets have
/// other types.
const ETHERNET: u32 = 1;

/// Why steering programs cannot be attached to an interface.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// There is no such interface.
    #[error("interface \"{name}\": {error}; `ip link` lists the interfaces")]
    Missing {
        /// Name of the interface.
        name: String,
        /// The kernel's answer.
        error: io::Error,
    },
    /// Packets of this interface have no Ethernet header.
    #[error(
        "interface \"{name}\" is not Ethernet (ARPHRD type {kind}): name the Ethernet interface that its packets use"
    )]
    NotEthernet {
        /// Name of the interface.
        name: String,
        /// ARPHRD type of the interface.
        kind: u32,
    },
    /// Two interfaces of the configuration lie one on the other, so packets of one pass the other, too: VLANs, macvlan,
    /// bridges, bonds.
    #[error(
        "interfaces \"{upper}\" and \"{lower}\" lie one on the other, and each packet would be translated twice: name \
         only one of them"
    )]
    Stacked {
        /// The interface whose packets pass `lower`, too.
        upper: String,
        /// The interface that `upper` lies on.
        lower: String,
    },
}

/// Returns the index of a network interface.
///
/// # Errors
/// Returns the kernel's error of socket(2) or ioctl(2), for example because there is no such interface.
pub fn interface_index(name: &str) -> io::Result<u32> {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, name)?)
}

/// Returns the name of a network interface, for logs. If the interface no longer exists, returns "number" and its
/// index.
pub fn interface_name(index: u32) -> String {
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let name = socket.and_then(|socket| rustix::net::netdevice::index_to_name(&socket, index));
    name.map_or_else(|_| format!("number {index}"), |name| name.to_string())
}

/// Returns the indices of these interfaces, all of which must be usable for steering programs.
///
/// # Errors
/// Returns an [`InterfaceError`] for the first interface that cannot be used.
pub fn indices(names: &[String]) -> Result<Vec<u32>, InterfaceError> {
    let sysfs = Sysfs::open();
    names.iter().map(|name| sysfs.index(name, names)).collect()
}

/// Returns the indices of the interfaces in `names` that exist now. The agent waits for the others (crates/agent,
/// os/ports.rs).
///
/// # Errors
/// Returns an [`InterfaceError`] for the first interface that exists and cannot be used.
pub fn present(names: &[String]) -> Result<Vec<u32>, InterfaceError> {
    let sysfs = Sysfs::open();
    let index = |name: &String| match sysfs.index(name, names) {
        Err(InterfaceError::Missing { .. }) => None,
        found => Some(found),
    };
    names.iter().filter_map(index).collect()
}

/// Returns for each interface that exists now, by its index, whether packets that leave by it also pass an interface in
/// `names`. They do so if `names` has the interface itself, or another one on which it lies.
pub fn covered(names: &[String]) -> BTreeMap<u32, bool> {
    let sysfs = Sysfs::open();
    let all = fs::read_dir(&sysfs.directory).into_iter().flatten().flatten();
    let all = all.filter_map(|entry| entry.file_name().into_string().ok());
    let is_covered =
        |name: &String| names.contains(name) || sysfs.all_below(name).iter().any(|one| names.contains(one));
    all.filter_map(|name| {
        let index = interface_index(&name).ok()?;
        // /sys may show another network namespace, whose interfaces may have the same names.
        (sysfs.number(&name, "ifindex") == Some(index)).then(|| (index, is_covered(&name)))
    })
    .collect()
}

/// Returns whether an interface is up. `None` where `/sys` does not tell.
pub fn is_up(name: &str) -> Option<bool> {
    let flags = fs::read_to_string(Sysfs::open().directory.join(name).join("flags")).ok()?;
    let flags = u32::from_str_radix(flags.trim().strip_prefix("0x")?, 16).ok()?;
    Some(flags & libc::IFF_UP as u32 != 0)
}

/// Returns the MTU of the interface that has this address, in bytes.
pub fn mtu_at(address: IpAddr) -> Option<u32> {
    let at = if_addrs::get_if_addrs().ok()?.into_iter().find(|interface| interface.ip() == address)?;
    Sysfs::open().number(&at.name, "mtu")
}

/// Directory of sysfs that has the interfaces (Documentation/ABI/testing/sysfs-class-net): those of this network
/// namespace, or, if sysfs cannot be mounted, those that `/sys` shows.
#[derive(Debug)]
pub struct Sysfs {
    directory: PathBuf,
    _mount: Option<OwnedFd>,
}

impl Sysfs {
    /// Mounts sysfs for this network namespace, because `/sys` shows the namespace in which it was mounted. Mounting
    /// needs CAP_SYS_ADMIN, which an agent may lack. Then `/sys` is used.
    pub fn open() -> Self {
        let mount = detached_sysfs().ok();
        let root = mount.as_ref().map_or("/sys".into(), |mount| format!("/proc/thread-self/fd/{}", mount.as_raw_fd()));
        Self { directory: Path::new(&root).join("class/net"), _mount: mount }
    }

    /// Returns the index of an interface, after a check that programs can be attached to it. `named` has all interfaces
    /// that the configuration names for the same role (frontend or backend): none of them may lie on another.
    pub fn index(&self, name: &str, named: &[String]) -> Result<u32, InterfaceError> {
        let missing = |error| InterfaceError::Missing { name: name.into(), error };
        let index = interface_index(name).map_err(missing)?;
        if self.number(name, "ifindex") == Some(index) {
            self.check(name, named)?;
        } else {
            tracing::warn!(
                interface = name,
                "cannot find the interface below it, because /sys belongs to another network namespace"
            );
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

    /// Returns all other interfaces that packets of this interface pass: those that it lies on, directly or through
    /// others.
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

    #[test]
    fn interfaces_have_names_and_numbers() {
        assert_eq!(interface_name(interface_index("lo").unwrap()), "lo");
        assert!(interface_index("no-such-port").is_err());
        assert_eq!(interface_name(u32::MAX >> 1), format!("number {}", u32::MAX >> 1));
    }
    use shunt_sys::netns::Netns;
    use std::process::Command;

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    /// Returns the answers of [`indices`] to `cases`, in a new network namespace that the `ip` commands `made_by` set
    /// up.
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
    fn interfaces_that_are_not_ethernet_or_lie_on_another_are_refused() {
        shunt_testbed::needs_root();
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
            "interface \"lo\" is not Ethernet (ARPHRD type 772): name the Ethernet interface that its packets use"
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
    fn a_missing_interface_is_refused_by_name() {
        let error = indices(&["no-such-port".into()]).unwrap_err().to_string();
        assert!(
            error.starts_with("interface \"no-such-port\": ") && error.ends_with("lists the interfaces"),
            "{error}"
        );
    }
}
