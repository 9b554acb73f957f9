//! Cases of `shunt-lab bench tls`, by names that never change. A *shortcut* is a response whose body bypasses tiers.

use super::super::case::Shape;
use super::super::subject::Subject;
use super::super::target::Target;
use crate::report::{Unit, number::size_name};
use crate::wire::Wire;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    /// The frontend's CPU per response with a body of 1 MiB.
    Frontend,
    /// The whole service's CPU per response, with two intermediates.
    Service { size: u64, wire: Wire },
    /// Cost of encryption at the backend, where Shunt does it, compared with its cost at plain nginx's frontend:
    ///
    /// - ours: the backend's CPU per response with Shunt, less that with plain nginx;
    /// - baseline: the CPU of plain nginx's frontend per response on TLS, less that of the same response on plain HTTP.
    ///
    /// Ours counts all that a shortcut adds to a backend, not only the cipher.
    Encryption,
    /// New connections per second, each with one response of 1 KiB, that one core of the frontend carries. wrk resumes
    /// its TLS sessions. A full handshake would cost more, but by the same amount with Shunt and without it.
    Handshake,
}

impl Subject for Case {
    fn all() -> Vec<Self> {
        let service = |(size, wire)| Self::Service { size, wire };
        let mut all = vec![Self::Frontend];
        all.extend([(MIB, Wire::Tso), (64 * KIB, Wire::Mtu)].map(service));
        all.extend([Self::Encryption, Self::Handshake]);
        all
    }

    fn name(self) -> String {
        match self {
            Self::Frontend => "fe-cpu/1m/tso".to_owned(),
            Self::Service { size, wire } => format!("cpu/2is/{}/{wire}", size_name(size)),
            Self::Encryption => "be-encrypt/1m".to_owned(),
            Self::Handshake => "handshake/1k".to_owned(),
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::Frontend | Self::Service { .. } | Self::Encryption => Unit::MicrosecondsPerResponse,
            Self::Handshake => Unit::ResponsesPerSecond,
        }
    }

    fn target(self) -> Option<Target> {
        Some(match self {
            Self::Frontend => Target::at_most(0.2),
            Self::Service { size: MIB, .. } => Target::at_most(0.35),
            Self::Service { .. } => Target::at_most(0.6),
            Self::Encryption => Target::at_most(1.1),
            Self::Handshake => Target::at_least(0.97),
        })
    }
}

impl Case {
    /// Size of the body that the case asks for, in bytes.
    pub(super) fn size(self) -> u64 {
        match self {
            Self::Frontend | Self::Encryption => MIB,
            Self::Service { size, .. } => size,
            Self::Handshake => KIB,
        }
    }

    /// Hosts and links that the case needs.
    pub(super) fn shape(self) -> Shape {
        let (intermediates, wire) = match self {
            Self::Frontend => (2, Wire::Tso),
            Self::Service { wire, .. } => (2, wire),
            // These cases are only about the frontend and the backend.
            Self::Encryption | Self::Handshake => (0, Wire::Tso),
        };
        Shape { intermediates, wire }
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
                "fe-cpu/1m/tso <= 0.2",
                "cpu/2is/1m/tso <= 0.35",
                "cpu/2is/64k/mtu <= 0.6",
                "be-encrypt/1m <= 1.1",
                "handshake/1k >= 0.97"
            ]
        );
    }
}
