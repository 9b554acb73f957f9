//! Cases of `shunt-lab bench disc`, by names that never change. A *shortcut* is a response whose body bypasses tiers.
//! The *physical limit* is what a response would cost if Shunt's own work cost nothing (limit.rs).

use super::subject::Subject;
use super::target::Target;
use crate::report::{Unit, number::size_name};
use crate::wire::Wire;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A quantile of the latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quantile {
    P50,
    P99,
}

/// A tier that is measured alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    Frontend,
    Intermediate,
}

/// A download at an RTT of 50 ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Download {
    /// 64 KiB, after another 64 KiB on the same connection.
    SecondResponse,
    /// 4 MiB on a new connection.
    FourMib,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    /// The whole service's CPU per response.
    Cpu {
        intermediates: u8,
        size: u64,
        wire: Wire,
    },
    /// The whole service's CPU per response, each response on a new connection.
    Alone {
        size: u64,
        wire: Wire,
    },
    /// CPU of a response that takes the shortcut, less the physical limit.
    Handoff,
    TierCpu {
        tier: Tier,
        size: u64,
        wire: Wire,
    },
    IntermediateBytes,
    /// Responses per second that one core of the frontend carries.
    Saturated {
        size: u64,
    },
    Latency {
        quantile: Quantile,
        size: u64,
    },
    /// Throughput of bodies that are too short for a shortcut: Shunt is present and not used.
    Idle,
    IdleTail,
    /// Goodput of a client at 50 ms RTT.
    Wan {
        download: Download,
        /// Whether 1% of the frames get lost, in each direction.
        loss: bool,
    },
}

/// The hosts and links that a case needs: number of intermediates, and kind of links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) intermediates: u8,
    pub(super) wire: Wire,
}

pub(super) const CPU_SIZES: [u64; 4] = [16 * KIB, 64 * KIB, 256 * KIB, MIB];
const ALONE_SIZES: [u64; 3] = [64 * KIB, 256 * KIB, MIB];

impl Subject for Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for intermediates in 0..=2 {
            for size in CPU_SIZES {
                all.extend([Wire::Tso, Wire::Mtu].map(|wire| Self::Cpu { intermediates, size, wire }));
            }
        }
        for size in ALONE_SIZES {
            all.extend([Wire::Tso, Wire::Mtu].map(|wire| Self::Alone { size, wire }));
        }
        all.push(Self::Handoff);
        for tier in [Tier::Frontend, Tier::Intermediate] {
            for wire in [Wire::Tso, Wire::Mtu] {
                all.extend([64 * KIB, MIB].map(|size| Self::TierCpu { tier, size, wire }));
            }
        }
        all.push(Self::IntermediateBytes);
        all.extend([32 * KIB, 256 * KIB].map(|size| Self::Saturated { size }));
        for quantile in [Quantile::P50, Quantile::P99] {
            all.extend([64 * KIB, MIB].map(|size| Self::Latency { quantile, size }));
        }
        all.extend([Self::Idle, Self::IdleTail]);
        for loss in [false, true] {
            all.extend([Download::SecondResponse, Download::FourMib].map(|download| Self::Wan { download, loss }));
        }
        all
    }

    fn name(self) -> String {
        match self {
            Self::Cpu { intermediates, size, wire } => format!("cpu/{intermediates}is/{}/{wire}", size_name(size)),
            Self::Alone { size, wire } => format!("alone/{}/{wire}", size_name(size)),
            Self::Handoff => "handoff/64k".to_owned(),
            Self::TierCpu { tier: Tier::Frontend, size, wire } => format!("fe-cpu/{}/{wire}", size_name(size)),
            Self::TierCpu { tier: Tier::Intermediate, size, wire } => format!("is-cpu/{}/{wire}", size_name(size)),
            Self::IntermediateBytes => "is-bytes/1m".to_owned(),
            Self::Saturated { size } => format!("saturated/{}/mtu", size_name(size)),
            Self::Latency { quantile: Quantile::P50, size } => format!("p50/{}", size_name(size)),
            Self::Latency { quantile: Quantile::P99, size } => format!("p99/{}", size_name(size)),
            Self::Idle => "idle/1k".to_owned(),
            Self::IdleTail => "idle-p999/1k".to_owned(),
            Self::Wan { download, loss } => {
                let what = match download {
                    Download::SecondResponse => "64k/second-response",
                    Download::FourMib => "4m",
                };
                format!("wan/50ms/{what}{}", if loss { "/loss1" } else { "" })
            }
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::Cpu { .. } | Self::Alone { .. } | Self::Handoff | Self::TierCpu { .. } => {
                Unit::MicrosecondsPerResponse
            }
            Self::IntermediateBytes => Unit::BytesPerResponse,
            Self::Saturated { .. } | Self::Idle => Unit::ResponsesPerSecond,
            Self::Latency { .. } | Self::IdleTail => Unit::Microseconds,
            Self::Wan { .. } => Unit::KibibytesPerSecond,
        }
    }

    fn target(self) -> Option<Target> {
        if let Self::TierCpu { size, .. } = self {
            return (size > 64 * KIB).then(|| Target::growth_at_most(1.2));
        }
        Some(match self.name().as_str() {
            "cpu/0is/64k/mtu" => Target::at_most(0.80),
            "cpu/2is/64k/mtu" => Target::at_most(0.48),
            "cpu/2is/64k/tso" => Target::at_most(0.75),
            "cpu/0is/256k/tso" => Target::at_most(0.45),
            "cpu/2is/1m/tso" | "cpu/2is/1m/mtu" => Target::at_most(0.20),
            "handoff/64k" => Target::at_most(25.0),
            "is-bytes/1m" => Target::at_most(0.01),
            "saturated/32k/mtu" => Target::at_least(1.8),
            "saturated/256k/mtu" => Target::at_least(5.0),
            "idle/1k" => Target::at_least(0.97),
            "idle-p999/1k" => Target::at_most(1.03),
            "p99/64k" => Target::at_most(1.0),
            "wan/50ms/64k/second-response" | "wan/50ms/4m" => Target::at_least(1.0),
            "wan/50ms/64k/second-response/loss1" | "wan/50ms/4m/loss1" => Target::at_least(0.95),
            _ => return None,
        })
    }
}

impl Case {
    /// Size of the body that the case asks for, in bytes.
    pub(super) fn size(self) -> u64 {
        match self {
            Self::Cpu { size, .. } | Self::Alone { size, .. } | Self::TierCpu { size, .. } => size,
            Self::Saturated { size } | Self::Latency { size, .. } => size,
            Self::Handoff => 64 * KIB,
            Self::IntermediateBytes => MIB,
            Self::Idle | Self::IdleTail => KIB,
            Self::Wan { download: Download::SecondResponse, .. } => 64 * KIB,
            Self::Wan { download: Download::FourMib, .. } => 4 * MIB,
        }
    }

    /// Hosts and links that the case needs. Cases of the same shape are measured in the same labs. `None` for downloads
    /// at an RTT of 50 ms, which have their own labs ([`super::wan`]).
    pub(super) fn shape(self) -> Option<Shape> {
        let (intermediates, wire) = match self {
            Self::Cpu { intermediates, wire, .. } => (intermediates, wire),
            Self::Alone { wire, .. } => (0, wire),
            Self::TierCpu { wire, .. } => (2, wire),
            Self::IntermediateBytes => (2, Wire::Mtu),
            Self::Handoff | Self::Saturated { .. } | Self::Latency { .. } | Self::Idle | Self::IdleTail => {
                (0, Wire::Mtu)
            }
            Self::Wan { .. } => return None,
        };
        Some(Shape { intermediates, wire })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.intermediates == 1 { "" } else { "s" };
        write!(f, "{} intermediate{plural}, {} wire", self.intermediates, self.wire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_never_change() {
        let names: Vec<String> = Case::all().into_iter().map(Case::name).collect();
        assert_eq!(names.len(), 24 + 6 + 1 + 8 + 1 + 2 + 4 + 2 + 4);
        for name in [
            "cpu/0is/16k/tso",
            "cpu/2is/1m/mtu",
            "alone/64k/tso",
            "alone/1m/mtu",
            "handoff/64k",
            "fe-cpu/64k/tso",
            "is-cpu/1m/mtu",
            "is-bytes/1m",
            "saturated/32k/mtu",
            "saturated/256k/mtu",
            "p50/64k",
            "p99/1m",
            "idle/1k",
            "idle-p999/1k",
            "wan/50ms/64k/second-response",
            "wan/50ms/4m",
            "wan/50ms/64k/second-response/loss1",
            "wan/50ms/4m/loss1",
        ] {
            assert!(names.iter().any(|one| one == name), "{name}");
            assert_eq!(Case::parse(name).unwrap().name(), name);
        }
    }

    #[test]
    fn no_two_cases_share_a_name() {
        let names: std::collections::BTreeSet<String> = Case::all().into_iter().map(Case::name).collect();
        assert_eq!(names.len(), Case::all().len());
        assert_eq!(Case::parse("cpu/3is/64k/tso"), None);
    }

    fn target(name: &str) -> Target {
        Case::parse(name).unwrap().target().unwrap()
    }

    #[test]
    fn bounds_hold_at_their_edge() {
        assert!(target("cpu/2is/1m/tso").is_met(0.2) && !target("cpu/2is/1m/tso").is_met(0.201));
        assert!(target("saturated/32k/mtu").is_met(1.8) && !target("saturated/32k/mtu").is_met(1.79));
        assert!(!target("idle/1k").is_met(f64::NAN) && !target("handoff/64k").is_met(f64::NAN));
    }

    #[test]
    fn every_target_has_its_case() {
        assert_eq!(Case::all().into_iter().filter_map(Case::target).count(), 6 + 1 + 4 + 1 + 2 + 2 + 1 + 4);
        assert_eq!(target("fe-cpu/1m/tso").to_string(), "growth <= 1.2");
        assert_eq!(target("saturated/256k/mtu").to_string(), ">= 5");
        assert_eq!(Case::parse("fe-cpu/64k/tso").unwrap().target(), None);
    }
}
