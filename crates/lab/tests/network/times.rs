//! Prints how long responses take over several links, with Shunt and without. Asserts nothing about these times.

use anyhow::Result;
use shunt_lab::{Link, Options, Role};

use super::service::{needs_root, start_on};
use super::way::{FILES, behind, far, get, lossy, narrow, patient, rough, small_mtu, very_lossy};

const SEEDS: u64 = 5;

/// Returns the time that all responses of one connection take together, in milliseconds.
fn milliseconds(link: Link, control: &'static str, options: Options) -> Result<u128> {
    let tiers = [Role::Frontend, Role::Backend].into_iter();
    let lab = tiers.fold(behind(link), |lab, role| lab.sysctl(role, "ipv4/tcp_congestion_control", control));
    start_on(lab, FILES, options, |service| {
        let fetched = get(service, &patient(service), &["/1m", "/100k", "/1m", "/1m"])?;
        Ok(fetched.iter().map(|one| one.elapsed.as_millis()).sum())
    })
}

/// Prints one line per seed, and one line for all seeds together, for each link and congestion control. The services
/// with and without Shunt are measured with the same seeds of the link's random losses.
#[test]
#[ignore = "takes minutes and only prints"]
fn times() -> Result<()> {
    needs_root();
    let links = [
        ("far", far()),
        ("lossy", lossy()),
        ("very lossy", very_lossy()),
        ("rough", rough()),
        ("narrow", narrow()),
        ("small MTU", small_mtu()),
    ];
    for control in ["cubic", "bbr"] {
        for (name, link) in links {
            let mut ratios = Vec::new();
            for seed in 0..SEEDS {
                let plain = milliseconds(link.seed(seed), control, Options::plain())?;
                let ours = milliseconds(link.seed(seed), control, Options::shunt())?;
                eprintln!("TIMES {control} {name} seed {seed}: {plain} ms plain, {ours} ms with Shunt");
                ratios.push(plain as f64 / ours as f64);
            }
            ratios.sort_by(f64::total_cmp);
            eprintln!("TIMES {control} {name}: speed {:.3} of plain nginx's", ratios[ratios.len() / 2]);
        }
    }
    Ok(())
}
