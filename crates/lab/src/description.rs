//! Description of a lab (test hosts as network namespaces) for other processes: a file in the lab's directory.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::host::{Host, Port, Role};
use crate::lab::Lab;
use crate::wire::Wire;
use shunt_testbed::LabId;

const FILE: &str = "lab.json";

/// A lab, as other processes know it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Description {
    pub id: String,
    pub wire: Wire,
    pub hosts: Vec<HostDescription>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct HostDescription {
    pub name: String,
    pub role: Role,
    pub namespace: String,
    pub ports: Vec<Port>,
}

impl Description {
    /// Reads the description of a lab, which may belong to another process.
    ///
    /// # Errors
    /// When the lab has no description, for instance while it is being built.
    pub fn of(id: &LabId) -> Result<Self> {
        let path = id.dir().join(FILE);
        let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display()))
    }

    /// Writes the description of a lab that is built.
    pub(crate) fn write(lab: &Lab) -> Result<()> {
        let of = |host: &Host| HostDescription {
            name: host.name().to_owned(),
            role: host.role(),
            namespace: host.namespace().to_owned(),
            ports: host.ports().to_vec(),
        };
        let hosts = lab.hosts_and_switch().map(of).collect();
        let description = Self { id: lab.id().to_string(), wire: lab.wire(), hosts };
        let path = lab.dir().join(FILE);
        let text = serde_json::to_vec_pretty(&description)?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }
}
