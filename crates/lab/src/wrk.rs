//! The closed-loop load: wrk. Each of its connections waits for an answer before it asks again.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::Host;

/// A run of wrk.
#[derive(Debug, Clone)]
pub struct Wrk {
    url: String,
    connections: u32,
    duration: Duration,
    new_connections: bool,
}

/// Report of wrk.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WrkReport {
    pub requests: u64,
    pub requests_per_second: f64,
    /// Bytes that wrk has read, as wrk rounds them.
    pub bytes_read: u64,
    pub elapsed: Duration,
    pub latency_p50: Duration,
    pub latency_p75: Duration,
    pub latency_p90: Duration,
    pub latency_p99: Duration,
    pub latency_max: Duration,
    /// Errors of connect, read and write, and timeouts.
    pub socket_errors: u64,
    /// Answers that were neither 2xx nor 3xx.
    pub status_errors: u64,
}

impl WrkReport {
    /// Errors of every kind.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.socket_errors + self.status_errors
    }
}

impl Wrk {
    /// 10 connections of one thread, for 3 seconds.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), connections: 10, duration: Duration::from_secs(3), new_connections: false }
    }

    #[must_use]
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the duration: whole seconds, at least one.
    #[must_use]
    pub fn duration(mut self, duration: Duration) -> Self {
        self.duration = duration;
        self
    }

    /// Makes a new connection for each request.
    #[must_use]
    pub fn new_connections(mut self) -> Self {
        self.new_connections = true;
        self
    }

    /// Runs wrk on `host` and waits for its end.
    ///
    /// # Errors
    /// When wrk is not installed, or fails.
    pub fn run(&self, host: &Host) -> Result<WrkReport> {
        parse(&host.check(self.command())?)
    }

    fn command(&self) -> Command {
        let mut wrk = Command::new("wrk");
        wrk.args(["--latency", "-t", "1", "-c", &self.connections.to_string()]);
        wrk.args(["-d", &format!("{}s", self.duration.as_secs().max(1))]);
        if self.new_connections {
            wrk.args(["-H", "Connection: close"]);
        }
        wrk.arg(&self.url);
        wrk
    }
}

/// Parses wrk's report.
fn parse(text: &str) -> Result<WrkReport> {
    let mut report = WrkReport::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["Latency", _average, _deviation, max, ..] if *max != "Distribution" => {
                report.latency_max = duration(max).unwrap_or_default();
            }
            ["50%", value] => report.latency_p50 = duration(value)?,
            ["75%", value] => report.latency_p75 = duration(value)?,
            ["90%", value] => report.latency_p90 = duration(value)?,
            ["99%", value] => report.latency_p99 = duration(value)?,
            [requests, "requests", "in", time, read, "read"] => {
                report.requests = requests.parse()?;
                report.elapsed = duration(time.trim_end_matches(','))?;
                report.bytes_read = bytes(read)?;
            }
            ["Requests/sec:", rate] => report.requests_per_second = rate.parse()?,
            ["Socket", "errors:", rest @ ..] => {
                let counts = rest.iter().filter_map(|word| word.trim_end_matches(',').parse::<u64>().ok());
                report.socket_errors = counts.sum();
            }
            ["Non-2xx", "or", "3xx", "responses:", count] => report.status_errors = count.parse()?,
            _ => {}
        }
    }
    if report.elapsed.is_zero() {
        bail!("wrk reported nothing:\n{text}");
    }
    Ok(report)
}

fn split_unit(text: &str) -> Result<(f64, &str)> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    Ok((number.parse().with_context(|| format!("wrk wrote {text:?}"))?, unit))
}

fn duration(text: &str) -> Result<Duration> {
    let (number, unit) = split_unit(text)?;
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => bail!("wrk wrote the time {text:?}"),
    };
    Ok(Duration::from_secs_f64(number * seconds))
}

fn bytes(text: &str) -> Result<u64> {
    let (number, unit) = split_unit(text)?;
    let factor = match unit {
        "B" => 1_u64,
        "KB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        "TB" => 1 << 40,
        _ => bail!("wrk wrote the size {text:?}"),
    };
    Ok((number * factor as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "Running 3s test @ http://10.77.0.1/64k\n  1 threads and 10 connections\n  \
        Thread Stats   Avg      Stdev     Max   +/- Stdev\n    \
        Latency   623.11us  102.31us   3.05ms   91.35%\n    Req/Sec    16.10k   512.28    17.00k    77.42%\n  \
        Latency Distribution\n     50%  612.00us\n     75%  640.00us\n     90%  701.00us\n     99%    1.02ms\n  \
        49651 requests in 3.10s, 3.04GB read\n  Socket errors: connect 0, read 2, write 0, timeout 1\n  \
        Non-2xx or 3xx responses: 7\nRequests/sec:  16017.91\nTransfer/sec:      1.00GB\n";

    #[test]
    fn a_report_is_read_whole() {
        let report = parse(REPORT).unwrap();
        assert_eq!(report.requests, 49_651);
        assert_eq!(report.elapsed, Duration::from_millis(3100));
        assert_eq!(report.latency_p50, Duration::from_micros(612));
        assert_eq!(report.latency_p99, Duration::from_micros(1020));
        assert_eq!(report.latency_max, Duration::from_micros(3050));
        assert!((report.requests_per_second - 16017.91).abs() < 1e-9);
        assert_eq!((report.socket_errors, report.status_errors, report.errors()), (3, 7, 10));
        assert_eq!(report.bytes_read >> 30, 3);
    }

    #[test]
    fn an_empty_report_is_an_error() {
        assert!(parse("unable to connect to 10.77.0.1:80 Connection refused\n").is_err());
    }
}
