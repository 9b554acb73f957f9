//! Which member a group of pages belongs to: weighted rendezvous hashing (Thaler and Ravishankar 1998, with the weights
//! of Schindelhauer and Schomaker 2005).
//!
//! Each member draws a number for the group, and the smallest number wins. A member that comes takes its share from all
//! others, and nothing moves between these. A member that goes leaves its groups to all others, by their weights.

use crate::name::GroupName;

/// Members of a pool, in the order of the configuration.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    members: Vec<Member>,
}

#[derive(Clone, Debug)]
struct Member {
    seed: u64,
    weight: f64,
}

impl Placement {
    /// Makes a placement from names of members and the number of pages that each of them lends. A member that lends
    /// nothing gets no group. Mounts agree on each group's member if they have the same names and numbers, in whatever
    /// order.
    pub fn new<'a>(members: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let members = members.into_iter().map(|(name, pages)| Member { seed: seed(name), weight: pages as f64 });
        Self { members: members.collect() }
    }

    /// Returns the position of the group's member, or `None` if no member lends anything.
    pub fn member(&self, group: GroupName) -> Option<usize> {
        let drawn = self.members.iter().enumerate().filter(|(_, member)| member.weight > 0.0);
        drawn.map(|(at, member)| (at, member.draw(group))).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(at, _)| at)
    }
}

impl Member {
    /// Draws from an exponential distribution whose mean is the reciprocal of the weight. libm's logarithm is the same
    /// on all machines, and that of the C library is not.
    fn draw(&self, group: GroupName) -> f64 {
        let bits = mixed(group.0 ^ self.seed) >> 11;
        let uniform = (bits as f64 + 0.5) / (1u64 << 53) as f64;
        -libm::log(uniform) / self.weight
    }
}

/// Returns a number for a member's name (FNV-1a).
fn seed(name: &str) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325;
    let hash = name.bytes().fold(start, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    mixed(hash)
}

/// Spreads each bit over all others (the last steps of SplitMix64).
fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GROUPS: u64 = 4096;

    fn groups() -> impl Iterator<Item = GroupName> {
        (0..GROUPS).map(|at| GroupName(mixed(at + 1)))
    }

    fn placement(members: &[(String, u64)]) -> Placement {
        Placement::new(members.iter().map(|(name, pages)| (name.as_str(), *pages)))
    }

    fn members() -> impl Strategy<Value = Vec<(String, u64)>> {
        prop::collection::vec(1u64..1 << 24, 1..12)
            .prop_map(|pages| pages.into_iter().enumerate().map(|(at, pages)| (format!("m{at}"), pages)).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

        #[test]
        fn a_member_that_comes_takes_groups_and_moves_no_others(before in members(), pages in 1u64..1 << 24) {
            let mut after = before.clone();
            after.push(("new".to_owned(), pages));
            let (old, new) = (placement(&before), placement(&after));
            for group in groups() {
                let member = new.member(group);
                prop_assert!(member == Some(before.len()) || member == old.member(group));
            }
        }

        #[test]
        fn the_order_of_the_list_does_not_matter(before in members()) {
            let after: Vec<_> = before.iter().rev().cloned().collect();
            let (old, new) = (placement(&before), placement(&after));
            for group in groups() {
                prop_assert_eq!(new.member(group).map(|at| before.len() - 1 - at), old.member(group));
            }
        }

        #[test]
        fn each_member_has_its_share(before in members()) {
            let all: u64 = before.iter().map(|(_, pages)| pages).sum();
            let placement = placement(&before);
            let mut found = vec![0f64; before.len()];
            groups().for_each(|group| found[placement.member(group).unwrap()] += 1.0);
            for (found, (name, pages)) in found.iter().zip(&before) {
                let share = *pages as f64 / all as f64;
                let expected = share * GROUPS as f64;
                // Six standard deviations: one wrong alarm in 10^8 members.
                let allowed = 6.0 * (expected * (1.0 - share)).sqrt() + 6.0;
                prop_assert!((found - expected).abs() <= allowed, "{}: {} groups, expected {}", name, found, expected);
            }
        }
    }

    #[test]
    fn a_pool_without_memory_has_no_member() {
        assert_eq!(Placement::default().member(GroupName(1)), None);
        assert_eq!(Placement::new([("a", 0)]).member(GroupName(1)), None);
        assert_eq!(Placement::new([("a", 0), ("b", 1)]).member(GroupName(1)), Some(1));
    }
}
