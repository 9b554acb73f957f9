//! `shuntd --print-defaults`: every key that has a default, with its value. Comments in the output list the other keys.

use super::{
    Config, default_drain, default_flow_quiet, default_heartbeat, default_lease, default_log, default_offer_lifetime,
    default_park, default_pins, default_ports, default_progress, default_reader_connections, default_segment,
    default_send_buffer, default_senders, default_socket, default_store_memory, default_store_socket, humantime,
};
use shunt_logic::limits::Limits;

impl Config {
    /// Returns a configuration file with all defaults. It is not complete: keys without a default appear only in
    /// comments.
    pub fn defaults() -> String {
        [machine(), frontend(), backend(), store(), limits()].join("\n")
    }
}

fn machine() -> String {
    format!(
        "# Keep only the sections of what this machine is: [frontend], [backend] and [store] each turn a role on.\n\
         # name, listen and [tls] have no default, nor have `interfaces` and [[peer]] (docs/shuntd.md)\n\
         socket = {:?}\n\
         pins = {:?}\n\
         seccomp = true\n\
         heartbeat = \"{}\"\n\
         drain = \"{}\"\n\
         log = {:?}\n\
         # socket_group, users, groups, observers, user, cgroup, metrics: not set\n",
        default_socket(),
        default_pins(),
        humantime(default_heartbeat()),
        humantime(default_drain()),
        default_log()
    )
}

fn frontend() -> String {
    format!("[frontend]\nflow_quiet = \"{}\"\n", humantime(default_flow_quiet()))
}

fn backend() -> String {
    let ports = default_ports().0;
    format!(
        "[backend]\n\
         ports = \"{}-{}\"\n\
         offer_lifetime = \"{}\"\n\
         senders = {}\n\
         send_buffer_bytes = {}\n\
         # socket_memory_bytes: a quarter of the first number of net.ipv4.tcp_mem\n\
         park = \"{}\"\n\
         progress = \"{}\"\n\
         # addresses: found\n",
        ports.start(),
        ports.end(),
        humantime(default_offer_lifetime()),
        default_senders(),
        default_send_buffer(),
        humantime(default_park()),
        humantime(default_progress())
    )
}

fn store() -> String {
    format!(
        "[store]\n\
         socket = {:?}\n\
         memory_bytes = {}\n\
         segment_bytes = {}\n\
         lease = \"{}\"\n\
         reader_connections = {}\n\
         # users, groups, readers, addresses: not set\n",
        default_store_socket(),
        default_store_memory(),
        default_segment(),
        humantime(default_lease()),
        default_reader_connections()
    )
}

fn limits() -> String {
    let Limits {
        handoffs,
        handoffs_per_peer,
        offers,
        offers_per_peer,
        bytes,
        bytes_per_peer,
        fetches,
        fetches_per_peer,
        servers,
    } = Limits::default();
    format!(
        "[limits]\n\
         handoffs = {handoffs}\n\
         handoffs_per_peer = {handoffs_per_peer}\n\
         offers = {offers}\n\
         offers_per_peer = {offers_per_peer}\n\
         bytes = {bytes}\n\
         bytes_per_peer = {bytes_per_peer}\n\
         fetches = {fetches}\n\
         fetches_per_peer = {fetches_per_peer}\n\
         servers = {servers}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Compares two configurations: the printed defaults plus the keys that have no default, and a configuration that
    /// has only these keys.
    #[test]
    fn the_defaults_are_those_that_a_configuration_has() {
        let own = "name = \"be1\"\nlisten = \"10.0.0.4:7440\"\n";
        let tls = "[tls]\ncertificate = \"a\"\nkey = \"b\"\nca = \"c\"\n";
        let interfaces = "interfaces = [\"eth0\"]\n";
        let with = |section: &str| format!("{section}\n{interfaces}");
        let all =
            Config::defaults().replace("[frontend]\n", &with("[frontend]")).replace("[backend]\n", &with("[backend]"));
        let short = format!("{own}{tls}{}{}[store]\n", with("[frontend]"), with("[backend]"));
        let parse = |text: &str| Config::parse(text, Path::new("shuntd.toml")).unwrap();
        let (all, short) = (parse(&format!("{own}{all}{tls}")), parse(&short));
        assert_eq!(format!("{all:?}"), format!("{short:?}"));
    }
}
