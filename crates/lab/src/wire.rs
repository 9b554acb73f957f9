//! Effect of the lab's cables on packets.

use std::process::Command;

use anyhow::Result;

use crate::host::Host;

/// The kind of link between every host and the switch. Real networks lie between these two kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// Segmentation offload: segments of up to 64 KiB cross whole. Easier for proxies than any network.
    #[default]
    Tso,
    /// No segmentation offload: one packet of 1,500 bytes at a time. Harder than a good network card.
    Mtu,
}

impl Wire {
    /// The name used in options, reports and benchmark cases.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tso => "tso",
            Self::Mtu => "mtu",
        }
    }

    /// Turns off the segmentation offloads of one device of `host` if the kind is [`Self::Mtu`]. By default these
    /// offloads are on. Checksum offload stays on with both kinds.
    pub(crate) fn configure(self, host: &Host, device: &str) -> Result<()> {
        if self == Self::Mtu {
            let mut ethtool = Command::new("ethtool");
            ethtool.args(["-K", device, "tso", "off", "gso", "off", "gro", "off", "tx-udp-segmentation", "off"]);
            host.check(ethtool)?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
