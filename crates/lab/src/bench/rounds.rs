//! Rounds of a measurement: the baseline (nginx without Shunt) and the service with Shunt ("ours") are loaded in turns.

use anyhow::Result;

use super::bed::Side;

/// Number of wrk's connections, except in cases that saturate the frontend.
pub(super) const CONNECTIONS: u32 = 10;

/// Calls `run` for the baseline and for ours in turns, `rounds` times each.
pub(super) fn alternate(rounds: usize, mut run: impl FnMut(Side) -> Result<()>) -> Result<()> {
    for _ in 0..rounds {
        run(Side::Baseline)?;
        run(Side::Ours)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_take_turns() {
        let mut order = Vec::new();
        alternate(2, |side| {
            order.push(side);
            Ok(())
        })
        .unwrap();
        assert_eq!(order, [Side::Baseline, Side::Ours, Side::Baseline, Side::Ours]);
    }
}
