//! Python programs on the frontend, under `shunt run`, that read bodies without looking at them.

use std::net::SocketAddr;

use anyhow::Result;
use shunt_lab::{OnDemand, Process};

use crate::intermediate;
use crate::service::Running;

/// Starts the Python program `text`. Its first argument is the address at which it is to listen, and its second
/// argument that of the server with the bodies. `arguments` follow. Returns the process, and the address at which it
/// listens.
pub fn start(service: &Running<'_>, text: &str, arguments: &[&str]) -> Result<(Process, SocketAddr)> {
    let frontend = service.lab.frontend();
    let file = frontend.dir().join("program.py");
    std::fs::write(frontend.dir().join("absent.py"), include_str!("absent.py"))?;
    std::fs::write(&file, text)?;
    let server = service.service.chain().server();
    let at = SocketAddr::new(server.ip(), 8000);
    let of = SocketAddr::new(intermediate(service)?.address().into(), server.port());
    let mut command = OnDemand::CHECKED.command(frontend)?;
    command.arg("python3").arg(file).arg(at.to_string()).arg(of.to_string()).args(arguments);
    Ok((frontend.serve(command, at)?, at))
}
