//! A running lab: its hosts, by name and by role.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::files;
use crate::host::{Host, Role};
use crate::link::Cable;
use crate::links;
use crate::placement::{Cores, Placement};
use crate::wire::Wire;
use shunt_testbed::{LabId, Watchdog};

/// A set of hosts that runs until it is dropped.
#[derive(Debug)]
pub struct Lab {
    /// Links that are no veth pairs. This is the first field, so that the links' threads end before the hosts are
    /// dropped.
    pub(crate) cables: Vec<Cable>,
    pub(crate) hosts: Vec<Host>,
    pub(crate) switch: Host,
    pub(crate) wire: Wire,
    pub(crate) cores: Cores,
    pub(crate) id: LabId,
    /// Watchdog that removes what the lab leaves. This is the last field, so that the watchdog works after the hosts'
    /// descriptors are closed.
    pub(crate) _watchdog: Watchdog,
}

impl Lab {
    #[must_use]
    pub fn id(&self) -> &LabId {
        &self.id
    }

    #[must_use]
    pub fn wire(&self) -> Wire {
        self.wire
    }

    #[must_use]
    pub fn cores(&self) -> Cores {
        self.cores
    }

    /// Directory for this lab's files, removed with the lab unless `SHUNT_LAB_KEEP=1`.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.id.dir()
    }

    /// All hosts from the client to the backend, without the switch.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    #[must_use]
    pub fn switch(&self) -> &Host {
        &self.switch
    }

    /// The links that are no veth pairs, in the order of their hosts.
    #[must_use]
    pub fn cables(&self) -> &[Cable] {
        &self.cables
    }

    /// All hosts and the switch.
    pub(crate) fn hosts_and_switch(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().chain([&self.switch])
    }

    /// The hosts of one role.
    pub fn hosts_of(&self, role: Role) -> impl Iterator<Item = &Host> {
        self.hosts.iter().filter(move |host| host.role() == role)
    }

    /// The tiers, frontend first.
    pub fn tiers(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().filter(|host| host.role().is_tier())
    }

    /// The first client.
    #[must_use]
    pub fn client(&self) -> &Host {
        self.first(Role::Client)
    }

    #[must_use]
    pub fn frontend(&self) -> &Host {
        self.first(Role::Frontend)
    }

    /// The intermediates, the frontend's neighbour first.
    #[must_use]
    pub fn intermediates(&self) -> Vec<&Host> {
        self.hosts_of(Role::Intermediate).collect()
    }

    /// The first backend.
    #[must_use]
    pub fn backend(&self) -> &Host {
        self.first(Role::Backend)
    }

    fn first(&self, role: Role) -> &Host {
        self.hosts_of(role).next().expect("every lab has a client, a frontend and a backend")
    }

    /// A host by its name, the switch included.
    ///
    /// # Errors
    /// When no host has that name.
    pub fn host(&self, name: &str) -> Result<&Host> {
        let found = self.hosts_and_switch().find(|host| host.name() == name);
        found.with_context(|| format!("the lab has no host {name:?}"))
    }

    /// Moves every host's processes and its reception of packets to the cores of `placement`. Processes that start
    /// later run there, too.
    ///
    /// # Errors
    /// When the placement names no host of this lab, or the kernel refuses a step.
    pub fn place(&self, placement: &Placement) -> Result<()> {
        let placed = placement.cores_of(self.hosts_and_switch(), self.cores)?;
        for host in self.hosts_and_switch() {
            host.place(placed.get(host.name()).copied().flatten())?;
        }
        Ok(())
    }

    /// Unplugs the cable of a host's port at the switch. The host notices that the port has no carrier, and keeps its
    /// addresses.
    ///
    /// # Errors
    /// When the host has no such device, or the kernel refuses.
    pub fn cut(&self, host: &Host, device: &str) -> Result<()> {
        self.set_cable(host, device, "down")
    }

    /// Plugs in again the cable that [`Self::cut`] unplugged.
    ///
    /// # Errors
    /// The same as those of [`Self::cut`].
    pub fn join(&self, host: &Host, device: &str) -> Result<()> {
        self.set_cable(host, device, "up")
    }

    fn set_cable(&self, host: &Host, device: &str, state: &str) -> Result<()> {
        let mut ip = Command::new("ip");
        ip.args(["link", "set", self.switch_device(host, device)?, state]);
        self.switch.check(ip).map(drop)
    }

    /// With `drops`, makes the switch drop all frames from and to a host's port. Without it, makes the switch carry
    /// them again. Neither end of the cable notices.
    ///
    /// # Errors
    /// When the host has no such device, or the kernel refuses.
    pub(crate) fn blackhole(&self, host: &Host, device: &str, drops: bool) -> Result<()> {
        // States of a bridge's port: 0 is disabled, 3 is forwarding (if_bridge.h).
        let mut bridge = Command::new("bridge");
        let state = if drops { "0" } else { "3" };
        bridge.args(["link", "set", "dev", self.switch_device(host, device)?, "state", state]);
        self.switch.check(bridge).map(drop)
    }

    /// Deletes a host's port, with its cable and its addresses.
    ///
    /// # Errors
    /// When the host has no such device, or the kernel refuses.
    pub fn delete_port(&self, host: &Host, device: &str) -> Result<()> {
        links::delete(host, device)
    }

    /// Makes a deleted port again: a new device with the same name and addresses.
    ///
    /// # Errors
    /// As [`Self::delete_port`].
    pub fn make_port(&self, host: &Host, device: &str) -> Result<()> {
        links::make(host, device, &self.switch, self.switch_device(host, device)?)
    }

    /// Name of the switch's device at the other end of the cable of a host's port.
    pub(crate) fn switch_device(&self, host: &Host, device: &str) -> Result<&str> {
        // The switch's ports are in the order of the hosts' ports (topology.rs).
        let mut ports = self.hosts.iter().flat_map(|host| host.ports().iter().map(move |port| (host.name(), port)));
        let at = ports.position(|(name, port)| name == host.name() && port.device == device);
        let at = at.with_context(|| format!("{} has no device {device}", host.name()))?;
        Ok(&self.switch.ports()[at].device)
    }

    /// Makes files of the given names and sizes in a directory of the lab, and returns that directory. Each name has
    /// other contents, which do not repeat within a short distance.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn files(&self, files: &[(impl AsRef<str>, u64)]) -> Result<PathBuf> {
        let dir = self.files_dir();
        std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        for (name, size) in files {
            let path = dir.join(name.as_ref());
            files::write(&path, name.as_ref(), *size).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(dir)
    }

    /// Directory in which [`Self::files`] makes the files.
    pub(crate) fn files_dir(&self) -> PathBuf {
        self.dir().join("files")
    }
}
