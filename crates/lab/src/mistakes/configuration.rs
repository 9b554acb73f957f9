//! Mistakes in the configuration of an agent (Shunt's daemon on a machine) or of nginx.

use super::text::{at, set, swap, value, without};
use super::{Bodies, Mistake, Teller};
use crate::host::Role::{Backend, Frontend, Intermediate};

/// Port at which no agent listens.
const NOBODYS_PORT: &str = "7441";

pub(super) fn rows() -> Vec<Mistake> {
    [kernel(), agents(), peers(), servers(), intermediates()].concat()
}

/// Mistakes in what an agent's configuration says about the kernel of its machine: interfaces, directories of pinned
/// BPF maps, control groups.
fn kernel() -> Vec<Mistake> {
    vec![
        Mistake::new("interface-missing", "the frontend's `interfaces` names one that does not exist")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Frontend, host, text, |text| set(text, "interfaces", "[\"eth7\"]")));
            })
            .told(Teller::Agent(Frontend), &["eth7"]),
        Mistake::new("interface-wrong", "the frontend's `interfaces` names another than clients' packets come in on")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Frontend, host, text, |text| set(text, "interfaces", "[\"service0\"]")));
            })
            .told(Teller::Server(Frontend), &["interfaces"]),
        Mistake::new("pins-elsewhere", "`pins` is a directory of no BPF file system")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    let elsewhere = format!("\"{}\"", host.dir().join("pins").display());
                    at(Frontend, host, text, |text| set(text, "pins", &elsewhere))
                });
            })
            .told(Teller::Agent(Frontend), &["pins", "BPF file system"]),
        Mistake::new("cgroup-missing", "`cgroup` is no directory")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| set(text, "cgroup", "\"/sys/fs/cgroup/nothing\""))
                });
            })
            .told(Teller::Agent(Frontend), &["/sys/fs/cgroup/nothing"]),
        Mistake::new("cgroup-wrong", "the servers of the frontend are not below `cgroup`")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        let others = value(text, "cgroup").replace("frontend", "client");
                        set(text, "cgroup", &format!("\"{others}\""))
                    })
                });
            })
            .told(Teller::Server(Frontend), &["cgroup"]),
    ]
}

/// Mistakes in what an agent's configuration says about the agent.
fn agents() -> Vec<Mistake> {
    vec![
        Mistake::new("no-backend-section", "the backend's configuration has no `[backend]`")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Backend, host, text, |text| swap(text, "[backend]\ninterfaces = [\"service0\"]\n", ""))
                });
            })
            .told(Teller::Agents, &["[backend]"]),
        Mistake::new("ports-in-use", "a program listens at one of the backend's `ports`")
            .beside(super::environment::take_sender_ports)
            .told(Teller::Agent(Backend), &["listens at", "[backend] ports"]),
        Mistake::new("listens-elsewhere", "the frontend's agent listens at an address that others do not reach")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Frontend, host, text, |text| set(text, "listen", "\"127.0.0.1:7440\"")));
            })
            .told(Teller::Agent(Backend), &["frontend", "10.77.1.1:7440"]),
        Mistake::new("heartbeats-differ", "`heartbeat` is 10 s on one machine and 50 ms on the other")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    let beat = if host.role() == Frontend { "10s" } else { "50ms" };
                    format!("heartbeat = \"{beat}\"\n{text}")
                });
            })
            .bodies(Bodies::Either)
            .told(Teller::Agent(Backend), &["frontend", "heartbeat"]),
        Mistake::new("unknown-key", "a key of the configuration is misspelt")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Backend, host, text, |text| swap(text, "[backend]\n", "[backend]\nofer_lifetime = \"1s\"\n"))
                });
            })
            .told(Teller::Agent(Backend), &["ofer_lifetime"]),
    ]
}

/// Mistakes in what an agent's configuration says about other machines.
fn peers() -> Vec<Mistake> {
    vec![
        Mistake::new(
            "speaks-for-missing",
            "the backend's `[[peer]]` lacks `speaks_for`, and clients know another address",
        )
        .settings(|settings| {
            settings.agent_text = Some(|host, text| at(Backend, host, text, |text| without(text, "speaks_for")));
        })
        .told(Teller::Server(Frontend), &["10.77.0.1", "speaks_for"]),
        Mistake::new("speaks-for-other-port", "`speaks_for` names another port than the frontend's")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Backend, host, text, |text| set(text, "speaks_for", "[\"10.77.0.1:8080\"]")));
            })
            .told(Teller::Server(Frontend), &["10.77.0.1:80", "speaks_for"]),
        Mistake::new("peer-name-wrong", "the frontend's `[[peer]]` has another name than the backend's certificate")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| swap(text, "name = \"backend\"", "name = \"backend9\""))
                });
            })
            .told(Teller::Agents, &["backend9"]),
        Mistake::new("peer-missing", "the frontend has no `[[peer]]` for the backend")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        let (before, peer) = text.split_once("[[peer]]").expect("a peer");
                        let (_, after) = peer.split_once("[tls]").expect("credentials");
                        format!("{before}[tls]{after}")
                    })
                });
            })
            .told(Teller::Agents, &["backend", "[[peer]]"]),
        Mistake::new("peer-address-nobodys", "a `[[peer]]` has an address that nobody has")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Backend, host, text, |text| set(text, "address", "\"10.77.1.250:7440\"")));
            })
            .told(Teller::Agent(Backend), &["frontend", "10.77.1.250:7440"]),
        Mistake::new("peer-port-wrong", "a `[[peer]]` has a port at which nobody listens")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Backend, host, text, |text| {
                        swap(text, "address = \"10.77.1.1:7440\"", &format!("address = \"10.77.1.1:{NOBODYS_PORT}\""))
                    })
                });
            })
            .told(Teller::Agent(Backend), &["frontend", "10.77.1.1:7441"]),
    ]
}

/// Returns nginx's configuration with an address in `shunt_trust` that nobody has.
fn trusting_another(text: &str) -> String {
    let line = text.lines().find(|line| line.trim_start().starts_with("shunt_trust ")).expect("a tier trusts others");
    swap(text, line, "shunt_trust 203.0.113.1;")
}

/// Mistakes in the configuration of the frontend's or the backend's nginx.
fn servers() -> Vec<Mistake> {
    vec![
        Mistake::new("trust-missing", "the frontend has `shunt on` and no `shunt_trust`")
            .settings(|settings| {
                settings.nginx_text = Some(|host, text| at(Frontend, host, text, |text| without(text, "shunt_trust")));
            })
            .told(Teller::Server(Frontend), &["shunt on", "shunt_trust"]),
        Mistake::new("trust-missing-at-backend", "the backend has `shunt_offer on` and no `shunt_trust`")
            .settings(|settings| {
                settings.nginx_text = Some(|host, text| at(Backend, host, text, |text| without(text, "shunt_trust")));
            })
            .told(Teller::Server(Backend), &["shunt_offer on", "shunt_trust"]),
        Mistake::new("trust-elsewhere", "the backend's `shunt_trust` does not name the tier before it")
            .settings(|settings| {
                settings.nginx_text = Some(|host, text| at(Backend, host, text, trusting_another));
            })
            .told(Teller::Server(Backend), &["10.77.1.", "shunt_trust"]),
        Mistake::new("socket-elsewhere", "`shunt_agent` names a socket that nobody listens at")
            .settings(|settings| {
                settings.nginx_text =
                    Some(|host, text| at(Frontend, host, text, |text| swap(text, "/agent.sock", "/other.sock")));
            })
            .told(Teller::Server(Frontend), &["other.sock"]),
        Mistake::new("socket-not-permitted", "nginx's workers have no permission on the agent's socket")
            .settings(|settings| {
                settings.nginx_text =
                    Some(|host, text| at(Frontend, host, text, |text| swap(text, "user root", "user www-data")));
            })
            .told(Teller::Server(Frontend), &["agent.sock"]),
        Mistake::new("users-without-nginx", "`users` lists others than the user of nginx's workers")
            .before(super::environment::open_way)
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    format!("{}{text}", if host.role() == Frontend { "users = [\"backup\"]\n" } else { "" })
                });
                settings.nginx_text =
                    Some(|host, text| at(Frontend, host, text, |text| swap(text, "user root", "user www-data")));
            })
            .told(Teller::Server(Frontend), &["does not serve", "\"users\""]),
        Mistake::new(
            "header-buffer-small",
            "the frontend's `proxy_buffer_size` has room for a header, but not with an offer",
        )
        .settings(|settings| {
            settings.nginx_text = Some(|host, text| {
                at(Frontend, host, text, |text| swap(text, "proxy_buffer_size 16k", "proxy_buffer_size 320"))
            });
        }),
    ]
}

/// Mistakes in the configuration of an intermediate's nginx, or in what the backend's nginx is told about an
/// intermediate.
fn intermediates() -> Vec<Mistake> {
    vec![
        Mistake::new("intermediate-filters", "an intermediate with the module has filters that touch bodies")
            .lab(|lab| lab.intermediates(1))
            .settings(|settings| {
                settings.nginx_text =
                    Some(|host, text| at(Intermediate, host, text, |text| filtering(&with_module(text))));
            }),
        Mistake::new("plain-intermediate-filters", "an intermediate without the module has filters that touch bodies")
            .lab(|lab| lab.intermediates(1))
            .settings(|settings| {
                settings.nginx_text = Some(|host, text| {
                    at(Intermediate, host, at(Backend, host, text, |text| swap(text, " plain;", ";")), filtering)
                });
            })
            .told(Teller::Server(Backend), &["shunt_trust", "plain"]),
        Mistake::new(
            "plain-intermediate",
            "an intermediate without the module, whose address the backend does not trust as `plain`",
        )
        .lab(|lab| lab.intermediates(1))
        .settings(|settings| {
            settings.nginx_text = Some(|host, text| at(Backend, host, text, |text| swap(text, " plain;", ";")));
        })
        .told(Teller::Server(Backend), &["shunt_trust", "plain"]),
        Mistake::new("other-namespace", "nginx's workers are in another network namespace than the agent")
            .lab(|lab| lab.intermediates(1))
            .settings(|settings| {
                settings.nginx_text = Some(|host, text| {
                    at(Intermediate, host, text, |text| {
                        let socket = host.dir().with_file_name("frontend").join("agent.sock");
                        let lines = format!(
                            "    shunt on;\n    shunt_agent {};\n    shunt_trust 10.77.1.0/24;\n",
                            socket.display()
                        );
                        swap(&with_module(text), "    access_log off;\n", &format!("    access_log off;\n{lines}"))
                    })
                });
            })
            .asked(|lab| lab.intermediates().first().map(|host| host.address()))
            .told(Teller::Server(Intermediate), &["namespace"]),
    ]
}

/// Adds Shunt's module to the configuration of an nginx that does not have it.
fn with_module(text: &str) -> String {
    let module = crate::service::module_file().expect("the module is built: other tiers have it");
    format!("load_module {};\n{text}", module.display())
}

/// Adds filters to the configuration of an nginx. Every body passes through the filters, which change nothing.
fn filtering(text: &str) -> String {
    let lines =
        "    sub_filter_types *;\n    sub_filter 'no file has these words in it' 'nor these';\n    gunzip on;\n";
    swap(text, "    access_log off;\n", &format!("    access_log off;\n{lines}"))
}
