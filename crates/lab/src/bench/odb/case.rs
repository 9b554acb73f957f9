//! Cases of `shunt-lab bench odb`, by names that never change. A *store* has the bodies that programs under `shunt run`
//! have written.

use std::fmt;

use super::super::case::Shape;
use super::super::subject::Subject;
use super::super::target::Target;
use crate::placement::Placement;
use crate::report::{Unit, number::size_name};
use crate::wire::Wire;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    /// Fraction of a body's bytes that never reach an intermediate's ports. The other bytes are counted as those that
    /// the ports receive for a response with the body, less those for a response without one.
    Bypass { unaligned: bool },
    /// One tier's CPU per response.
    Tier { tier: Tier, size: u64, wire: Wire },
    /// The frontend's CPU per response of 1 MiB to clients that speak TLS 1.3.
    FrontendTls,
    /// New connections of TLS 1.3 per second, each with one response of 1 KiB, that one core of the frontend carries.
    Handshake,
    /// The whole service's CPU per response, with two intermediates.
    Service,
    /// Throughput of bodies that are too short for the store, so that they go through all tiers.
    Small,
    /// Throughput of bodies that the intermediate reads to the last byte.
    Touched,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    Frontend,
    Intermediate,
    Backend,
}

/// The hosts, links and programs that a case needs. Cases of the same kind are measured in the same labs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) shape: Shape,
    pub(super) unaligned: bool,
    pub(super) tls: bool,
}

impl Subject for Case {
    fn all() -> Vec<Self> {
        let tier = |(tier, size, wire)| Self::Tier { tier, size, wire };
        let mut all = [false, true].map(|unaligned| Self::Bypass { unaligned }).to_vec();
        all.extend(
            [
                (Tier::Intermediate, 64 * KIB, Wire::Mtu),
                (Tier::Intermediate, 32 * KIB, Wire::Mtu),
                (Tier::Intermediate, MIB, Wire::Tso),
                (Tier::Frontend, MIB, Wire::Tso),
                (Tier::Backend, 64 * KIB, Wire::Mtu),
            ]
            .map(tier),
        );
        all.extend([Self::FrontendTls, Self::Handshake, Self::Service, Self::Small, Self::Touched]);
        all
    }

    fn name(self) -> String {
        match self {
            Self::Bypass { unaligned: false } => "bypass/64k".to_owned(),
            Self::Bypass { unaligned: true } => "bypass/64k/unaligned".to_owned(),
            // The backend has only one case, so the name does not say the kind of link.
            Self::Tier { tier: Tier::Backend, size, .. } => format!("be-cpu/{}", size_name(size)),
            Self::Tier { tier: Tier::Intermediate, size, wire } => format!("is-cpu/{}/{wire}", size_name(size)),
            Self::Tier { tier: Tier::Frontend, size, wire } => format!("fe-cpu/{}/{wire}", size_name(size)),
            Self::FrontendTls => "fe-cpu/1m/tls".to_owned(),
            Self::Handshake => "handshake/1k".to_owned(),
            Self::Service => "cpu/2is/1m/tso".to_owned(),
            Self::Small => "small/3k".to_owned(),
            Self::Touched => "touched/64k".to_owned(),
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::Bypass { .. } => Unit::OfTheBody,
            Self::Tier { .. } | Self::FrontendTls | Self::Service => Unit::MicrosecondsPerResponse,
            Self::Handshake | Self::Small | Self::Touched => Unit::ResponsesPerSecond,
        }
    }

    fn target(self) -> Option<Target> {
        Some(match self {
            Self::Bypass { .. } => Target::at_least(0.99),
            Self::Tier { tier: Tier::Intermediate, size: MIB, .. } => Target::at_most(0.1),
            Self::Tier { tier: Tier::Intermediate, size, .. } if size > 32 * KIB => Target::at_most(0.35),
            Self::Tier { tier: Tier::Intermediate, .. } => Target::at_most(0.6),
            Self::Tier { tier: Tier::Frontend, .. } => Target::at_most(0.2),
            Self::Tier { tier: Tier::Backend, .. } => Target::at_most(1.3),
            Self::Service => Target::at_most(0.25),
            Self::FrontendTls => Target::at_most(0.3),
            Self::Handshake | Self::Small => Target::at_least(0.97),
            Self::Touched => Target::at_least(0.8),
        })
    }
}

impl Case {
    /// Size of the body that the case asks for, in bytes.
    pub(super) fn size(self) -> u64 {
        match self {
            Self::Tier { size, .. } => size,
            Self::Bypass { .. } | Self::Touched => 64 * KIB,
            Self::FrontendTls | Self::Service => MIB,
            Self::Handshake => KIB,
            Self::Small => 3 * KIB,
        }
    }

    pub(super) fn kind(self) -> Kind {
        let (intermediates, wire) = match self {
            Self::Tier { wire, .. } => (1, wire),
            Self::FrontendTls | Self::Handshake => (1, Wire::Tso),
            Self::Service => (2, Wire::Tso),
            Self::Bypass { .. } | Self::Small | Self::Touched => (1, Wire::Mtu),
        };
        Kind {
            shape: Shape { intermediates, wire },
            unaligned: self == Self::Bypass { unaligned: true },
            tls: matches!(self, Self::FrontendTls | Self::Handshake),
        }
    }

    /// The host, or the whole service, that runs on the measured core in this case.
    pub(super) fn placement(self) -> Placement {
        match self {
            Self::Tier { tier, .. } => Placement::Tier(
                match tier {
                    Tier::Frontend => "frontend",
                    Tier::Intermediate => INTERMEDIATE,
                    Tier::Backend => "backend",
                }
                .to_owned(),
            ),
            Self::FrontendTls | Self::Handshake => Placement::Tier("frontend".to_owned()),
            _ => Placement::WholeService,
        }
    }
}

/// The intermediate next to the frontend.
pub(super) const INTERMEDIATE: &str = "intermediate1";

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unaligned = if self.unaligned { ", unaligned buffers" } else { "" };
        write!(f, "{}{unaligned}{}", self.shape, if self.tls { ", TLS" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_targets_never_change() {
        let all: Vec<String> =
            Case::all().into_iter().map(|case| format!("{} {}", case.name(), case.target().unwrap())).collect();
        assert_eq!(
            all,
            [
                "bypass/64k >= 0.99",
                "bypass/64k/unaligned >= 0.99",
                "is-cpu/64k/mtu <= 0.35",
                "is-cpu/32k/mtu <= 0.6",
                "is-cpu/1m/tso <= 0.1",
                "fe-cpu/1m/tso <= 0.2",
                "be-cpu/64k <= 1.3",
                "fe-cpu/1m/tls <= 0.3",
                "handshake/1k >= 0.97",
                "cpu/2is/1m/tso <= 0.25",
                "small/3k >= 0.97",
                "touched/64k >= 0.8",
            ]
        );
    }
}
