//! Networks that differ from what the configuration assumes.

use std::process::Command;

use anyhow::Result;

use super::text::{at, set, swap};
use super::{Bodies, Mistake, Teller};
use crate::host::Host;
use crate::host::Role::{Backend, Frontend};
use crate::lab::Lab;

/// Public address of the service, for the rows in which clients do not use the address of the frontend's port.
const PUBLIC: [u8; 4] = [10, 77, 200, 1];

pub(super) fn rows() -> Vec<Mistake> {
    [ports(), ways(), addresses()].concat()
}

fn ports() -> Vec<Mistake> {
    vec![
        Mistake::new("interface-down", "an interface of `interfaces` is down")
            .before(|lab| ip(lab.frontend(), "link add spare0 type veth peer name spare1"))
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| set(text, "interfaces", "[\"client0\", \"spare0\"]"))
                });
            })
            .bodies(Bodies::Shortcut),
        Mistake::new("interface-made-anew", "the frontend's interface is deleted and made anew while the agent runs")
            .after(|running| {
                let frontend = running.lab.frontend();
                running.lab.delete_port(frontend, "client0")?;
                running.lab.make_port(frontend, "client0")
            })
            .bodies(Bodies::Shortcut)
            .told(Teller::Agent(Frontend), &["has appeared", "client0"]),
        Mistake::new("backend-interface-wrong", "the backend's `interfaces` names another than payloads leave by")
            .before(|lab| spare(lab.backend()))
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Backend, host, text, |text| set(text, "interfaces", "[\"spare0\"]")));
            })
            .told(Teller::Agent(Backend), &["10.77.0", "service0", "interfaces"]),
        Mistake::new("smaller-mtu", "the backend's interface has a smaller MTU than the frontend's")
            .before(|lab| ip(lab.backend(), "link set service0 mtu 1300"))
            .bodies(Bodies::Shortcut),
    ]
}

fn ways() -> Vec<Mistake> {
    vec![
        Mistake::new("port-blackholed", "packets to the agents' port vanish")
            .before(|lab| ["dport", "sport"].into_iter().try_for_each(|end| ip(lab.frontend(), &format!("rule add pref 10 ipproto tcp {end} 7440 blackhole"))))
            .told(Teller::Agent(Backend), &["frontend", "10.77.1.1:7440"]),
        Mistake::new("no-way-to-clients", "the backend has no route to clients")
            .before(|lab| ip(lab.backend(), "route del 10.77.0.0/24"))
            .told(Teller::Agent(Backend), &["10.77.0", "no route"]),
        Mistake::new("strict-rp-filter", "rp_filter = 1 on the frontend and on the backend")
            .before(|lab| {
                lab.frontend().sysctls(STRICT)?;
                lab.backend().sysctls(STRICT)
            })
            .bodies(Bodies::Shortcut),
        Mistake::new("router-checks-sources", "a router between backend and clients drops packets with the frontend's address (rp_filter = 1)")
            .lab(|lab| lab.routed())
            .before(|lab| lab.switch().sysctls(&[("ipv4/conf/all/rp_filter", "1")]))
            .told(Teller::Agent(Backend), &["rp_filter", "10.77.0.1:80"]),
        Mistake::new("ports-closed", "a firewall of the backend drops what comes to `ports` of [backend]")
            .before(|lab| {
                let commands =
                    ["add table ip lab", "add chain ip lab in { type filter hook prerouting priority -300 ; }", "add rule ip lab in tcp dport 61000-61063 drop"];
                commands.into_iter().try_for_each(|command| run(lab.backend(), "nft", &[command]))
            })
            .told(Teller::Agent(Backend), &["of [backend]", "10.77.0.1:80"])
            // A body that fits into one window arrives nevertheless: the client acknowledges the body, and the frontend
            // sees the acknowledgment.
            .bodies(Bodies::Either),
        Mistake::new("backend-checks-sources", "the backend drops clients' ACKs, which come in on another port than its route to clients leaves by (rp_filter = 1)")
            .before(|lab| {
                spare(lab.backend())?;
                ip(lab.backend(), "route replace 10.77.0.10/32 dev spare0")?;
                lab.backend().sysctls(STRICT)
            })
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Backend, host, text, |text| set(text, "interfaces", "[\"service0\", \"spare0\"]")));
            })
            .told(Teller::Agent(Backend), &["10.77.0", "service0", "rp_filter"]),
    ]
}

fn addresses() -> Vec<Mistake> {
    vec![
        Mistake::new("redirect", "nftables redirects clients from port 80 to 8080, where nginx listens")
            .before(|lab| nat(lab.frontend(), &["tcp", "dport", "80", "redirect", "to", ":8080"]))
            .settings(|settings| {
                settings.nginx_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        swap(text, "backlog=4096;\n", "backlog=4096;\n        listen 8080;\n")
                    })
                });
            })
            .told(Teller::Server(Frontend), &["interfaces", "DNAT"]),
        Mistake::new("destination-nat", "nftables rewrites a public address to the frontend's own")
            .before(|lab| {
                nat(lab.frontend(), &["ip", "daddr", "10.77.200.1", "dnat", "to", "10.77.0.1"])?;
                ip(lab.client(), "route add 10.77.200.1/32 via 10.77.0.1")
            })
            .asked(|_| Some(PUBLIC.into()))
            .told(Teller::Server(Frontend), &["interfaces", "DNAT"]),
        Mistake::new("address-on-lo", "the service's address is on lo (anycast, a VIP)")
            .before(|lab| public_on(lab, "lo"))
            .settings(|settings| settings.speaks_for = Some("\"10.77.0.0/16\""))
            .settings(|settings| settings.nginx_text = Some(listening_there))
            .asked(|_| Some(PUBLIC.into()))
            .bodies(Bodies::Shortcut),
        Mistake::new(
            "address-on-another-port",
            "the service's address is on an interface that clients' packets do not use",
        )
        .before(|lab| {
            spare(lab.frontend())?;
            public_on(lab, "spare0")
        })
        .settings(|settings| settings.speaks_for = Some("\"10.77.0.0/16\""))
        .settings(|settings| settings.nginx_text = Some(listening_there))
        .asked(|_| Some(PUBLIC.into()))
        .bodies(Bodies::Shortcut),
    ]
}

const STRICT: &[(&str, &str)] = &[("ipv4/conf/all/rp_filter", "1"), ("ipv4/conf/default/rp_filter", "1")];

fn run(host: &Host, program: &str, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(program);
    command.args(arguments);
    host.check(command).map(drop)
}

/// Runs `ip` with these arguments on a host.
fn ip(host: &Host, words: &str) -> Result<()> {
    run(host, "ip", &words.split(' ').collect::<Vec<_>>())
}

/// Makes a further port of a host. The port is up, and leads nowhere.
fn spare(host: &Host) -> Result<()> {
    ip(host, "link add spare0 up type veth peer name spare1")?;
    ip(host, "link set spare1 up")
}

/// Adds an nftables rule that rewrites the destinations of incoming packets.
fn nat(host: &Host, rule: &[&str]) -> Result<()> {
    run(host, "nft", &["add", "table", "ip", "lab"])?;
    run(host, "nft", &["add chain ip lab in { type nat hook prerouting priority -100 ; }"])?;
    run(host, "nft", &[&["add", "rule", "ip", "lab", "in"], rule].concat())
}

/// Gives the frontend the public address, on this device, and gives the client a route to it.
fn public_on(lab: &Lab, device: &str) -> Result<()> {
    ip(lab.frontend(), &format!("addr add 10.77.200.1/32 dev {device}"))?;
    ip(lab.client(), "route add 10.77.200.1/32 via 10.77.0.1")
}

/// Lets the frontend's nginx listen at the public address, too.
fn listening_there(host: &Host, text: String) -> String {
    at(Frontend, host, text, |text| swap(text, "backlog=4096;\n", "backlog=4096;\n        listen 10.77.200.1:80;\n"))
}
