//! Builder of labs: the description of a lab (test hosts on one machine), and the steps that make running hosts from
//! it.

use anyhow::{Context, Result, ensure};

use crate::description::Description;
use crate::host::Role;
use crate::lab::Lab;
use crate::link::{Link, Whose};
use crate::links;
use crate::placement::{Cores, Placement};
use crate::topology::{self, HostPlan};
use crate::wire::Wire;
use shunt_testbed::{LabId, Watchdog};

/// Largest number of hosts of one role.
const HOSTS_LIMIT: u8 = 64;

/// Description of a lab to build.
#[derive(Debug, Clone)]
pub struct LabBuilder {
    clients: u8,
    intermediates: u8,
    backends: u8,
    wire: Wire,
    placement: Placement,
    cores: Cores,
    links: Vec<(Whose, Link)>,
    ipv6: bool,
    routed: bool,
    sysctls: Vec<(Role, &'static str, &'static str)>,
}

impl Lab {
    /// Builder with the defaults: one client, a frontend, no intermediate, one backend, links of kind [`Wire::Tso`].
    #[must_use]
    pub fn builder() -> LabBuilder {
        LabBuilder::default()
    }
}

impl LabBuilder {
    /// Number of client hosts; 1 by default.
    #[must_use]
    pub fn clients(mut self, count: u8) -> Self {
        self.clients = count;
        self
    }

    /// Number of hosts between the frontend and the backends; 0 by default.
    #[must_use]
    pub fn intermediates(mut self, count: u8) -> Self {
        self.intermediates = count;
        self
    }

    /// Number of backend hosts; 1 by default.
    #[must_use]
    pub fn backends(mut self, count: u8) -> Self {
        self.backends = count;
        self
    }

    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Selects the hosts whose processes and reception of packets run on the measured core (the core whose CPU time is
    /// measured). By default no host is placed.
    #[must_use]
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    #[must_use]
    pub fn cores(mut self, cores: Cores) -> Self {
        self.cores = cores;
        self
    }

    /// Gives every host IPv6 addresses besides its IPv4 ones.
    #[must_use]
    pub fn ipv6(mut self) -> Self {
        self.ipv6 = true;
        self
    }

    /// Joins the hosts by a router instead of a bridge, so that no two hosts share a link.
    #[must_use]
    pub fn routed(mut self) -> Self {
        self.routed = true;
        self
    }

    /// Sets a network sysctl, such as `ipv4/tcp_sack`, on all hosts of a role.
    #[must_use]
    pub fn sysctl(mut self, role: Role, key: &'static str, value: &'static str) -> Self {
        self.sysctls.push((role, key, value));
        self
    }

    /// Gives all clients links with these properties. By default they have veth pairs, like all other hosts.
    #[must_use]
    pub fn client_link(self, link: Link) -> Self {
        self.link(Role::Client, link)
    }

    /// Gives all hosts of a role links with these properties, one for each of their ports. The random seed of the links
    /// is printed.
    #[must_use]
    pub fn link(mut self, role: Role, link: Link) -> Self {
        self.links.retain(|(other, _)| *other != Whose::Role(role));
        self.links.push((Whose::Role(role), link));
        self
    }

    /// Gives the host `name` links with these properties, one for each of its ports.
    #[must_use]
    pub fn host_link(mut self, name: &'static str, link: Link) -> Self {
        self.links.push((Whose::Host(name), link));
        self
    }

    /// Builds the lab.
    ///
    /// # Errors
    /// Without root, when the numbers of hosts or a link's properties make no sense, and when the kernel or `ip`
    /// refuses a step.
    pub fn build(self) -> Result<Lab> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the lab needs root, because it makes network namespaces: use sudo"
        );
        for (count, what) in
            [(self.clients, "clients"), (self.backends, "backends"), (self.intermediates, "intermediates")]
        {
            ensure!(count <= HOSTS_LIMIT, "at most {HOSTS_LIMIT} {what}");
        }
        ensure!(self.clients > 0 && self.backends > 0, "a lab needs a client and a backend");
        for (whose, link) in &self.links {
            ensure!(*whose != Whose::Role(Role::Switch), "the switch's links are those of its hosts");
            link.check()?;
        }
        let id = LabId::fresh();
        let keep_files = std::env::var_os("SHUNT_LAB_KEEP").is_some_and(|keep| keep == "1");
        let watchdog = Watchdog::start(&id, keep_files).context("starting the lab's watchdog")?;
        let mut plans = topology::hosts(self.clients, self.intermediates, self.backends);
        if self.ipv6 {
            plans.iter_mut().for_each(HostPlan::add_ipv6);
        }
        let switch_plan = topology::switch(&plans);
        links::make_namespaces(plans.iter().chain([&switch_plan]), &id)?;
        let switch = switch_plan.open(&id)?;
        let hosts = plans.iter().map(|plan| plan.open(&id)).collect::<Result<Vec<_>>>()?;
        let Self { wire, ipv6, routed, .. } = self;
        let joins = links::Joins { plans: &plans, switch: &switch, wire, links: &self.links, ipv6, routed };
        let cables = joins.join(&hosts, &id, self.cores.rest)?;
        for host in &hosts {
            let own = self.sysctls.iter().filter(|(role, ..)| *role == host.role());
            host.sysctls(&own.map(|(_, key, value)| (*key, *value)).collect::<Vec<_>>())?;
        }
        let lab = Lab { cables, hosts, switch, wire: self.wire, cores: self.cores, id, _watchdog: watchdog };
        Description::write(&lab)?;
        lab.place(&self.placement)?;
        Ok(lab)
    }
}

impl Default for LabBuilder {
    /// One client, a frontend, no intermediate, one backend, links of kind [`Wire::Tso`].
    fn default() -> Self {
        let (wire, placement, cores) = (Wire::default(), Placement::default(), Cores::default());
        Self {
            clients: 1,
            intermediates: 0,
            backends: 1,
            wire,
            placement,
            cores,
            links: Vec::new(),
            ipv6: false,
            routed: false,
            sysctls: Vec::new(),
        }
    }
}
