//! Links with delays, losses, late and repeated frames, a limited rate, and a small MTU, with CUBIC.

use anyhow::Result;

use super::way::{PATHS, SHORT_PATHS, behind, far, farthest, lossy, narrow, over, rough, small_mtu, very_lossy};

#[test]
fn a_long_delay() -> Result<()> {
    over(behind(far()), PATHS)
}

#[test]
fn the_longest_delay() -> Result<()> {
    over(behind(farthest()), SHORT_PATHS)
}

#[test]
fn independent_losses() -> Result<()> {
    over(behind(lossy()), PATHS)
}

#[test]
fn many_losses() -> Result<()> {
    over(behind(very_lossy()), SHORT_PATHS)
}

#[test]
fn bursts_of_losses_with_late_and_repeated_frames() -> Result<()> {
    over(behind(rough()), PATHS)
}

#[test]
fn a_low_rate_with_a_short_queue() -> Result<()> {
    over(behind(narrow()), PATHS)
}

#[test]
fn a_small_mtu() -> Result<()> {
    over(behind(small_mtu()), PATHS)
}
