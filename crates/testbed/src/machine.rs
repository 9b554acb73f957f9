//! A machine for tests of routes: a network namespace with two uplinks, the interfaces `east` and `west`, and service
//! addresses on `lo`.

use std::process::{Command, Output};

use shunt_sys::netns::Netns;

const SET_UP: &[&str] = &[
    "link set lo up",
    "addr add 192.0.2.1/32 dev lo",
    "addr add 2001:db8::1/128 dev lo",
    "link add east type veth peer name far-east",
    "link add west type veth peer name far-west",
    "addr add 10.0.1.1/24 dev east",
    "addr add 10.0.2.1/24 dev west",
    "addr add fd00:1::1/64 dev east nodad",
    "addr add fd00:2::1/64 dev west nodad",
    "link set far-east up",
    "link set far-west up",
    "link set east up",
    "link set west up",
];

/// A machine, by the name of its network namespace. Dropping this value removes the namespace.
pub struct Machine(String);

impl Machine {
    /// Runs `ip` on the machine, and returns its output.
    pub fn try_ip(&self, arguments: &str) -> Output {
        Command::new("ip").args(["-n", &self.0]).args(arguments.split(' ')).output().unwrap()
    }

    pub fn ip(&self, arguments: &str) {
        let output = self.try_ip(arguments);
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

/// Runs `work` in the network namespace of a new machine, on which the `ip` commands `more` have run.
///
/// # Panics
/// When this process is not root, or a command fails.
pub fn on_a_machine<T: Send>(test: &str, more: &[&str], work: impl FnOnce(&Machine) -> T + Send) -> T {
    crate::needs_root();
    let name = format!("shunt-{test}-{}", std::process::id());
    assert!(Command::new("ip").args(["netns", "add", &name]).status().unwrap().success());
    let machine = Machine(name);
    SET_UP.iter().chain(more).for_each(|command| machine.ip(command));
    Netns::named(&machine.0).unwrap().run(|| work(&machine)).unwrap()
}
