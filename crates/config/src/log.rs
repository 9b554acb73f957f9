//! Log levels, in the syntax of the environment variable RUST_LOG.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

const ADVICE: &str = "write error, warn, info, debug or trace";

/// Returns what is wrong with a log level, or `None` if it can be used. EnvFilter takes a word that is no level for the
/// name of a part of the program, and logs that part only. A typing error would give an agent without a log.
pub fn log_problem(text: &str) -> Option<String> {
    if let Err(error) = EnvFilter::try_new(text) {
        return Some(format!("{error}; {ADVICE}"));
    }
    let is_bare = |word: &&str| !word.is_empty() && !word.contains(['=', '[', ']', '{', '}']);
    let words = text.split(',').filter(is_bare);
    let unknown = words.into_iter().find(|word| word.parse::<LevelFilter>().is_err())?;
    Some(format!("\"{unknown}\" is no level: {ADVICE}, or PART=LEVEL for a part of the program"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_level_may_stand_alone() {
        for good in ["info", "WARN", "off", "info,shunt_transport=debug", "warn,libbpf=trace", "shunt[x]=debug"] {
            assert_eq!(log_problem(good), None, "{good}");
        }
        for (bad, said) in
            [("verbose", "\"verbose\" is no level: write error, warn"), ("inf", "\"inf\""), ("info,shunt", "\"shunt\"")]
        {
            let problem = log_problem(bad).unwrap();
            assert!(problem.contains(said), "{bad}: {problem}");
        }
        assert!(log_problem("shunt=loud").unwrap().ends_with(ADVICE));
    }
}
