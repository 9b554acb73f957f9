//! Numbers formatted for people.

/// Formats a number by its size without the sign: 0 as `0`, below 10 with two decimals, below 100 with one, and from
/// 100 on with none. Thousands are separated: `0.12`, `3.45`, `67.8`, `1,234`. A number that is not finite becomes `-`.
#[must_use]
pub fn plain(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "-".to_owned(),
        0.0 => "0".to_owned(),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => thousands(value.round() as i64),
    }
}

/// Formats microseconds: `0.12 us`, `1,234 us`.
#[must_use]
pub fn microseconds(value: f64) -> String {
    format!("{} us", plain(value))
}

/// Formats a whole count, with separated thousands.
#[must_use]
pub fn count(value: u64) -> String {
    thousands(i64::try_from(value).unwrap_or(i64::MAX))
}

fn thousands(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0 { format!("-{text}") } else { text }
}

/// Formats a number of bytes: `512 B`, `64.0 KiB`, `1.50 MiB`.
#[must_use]
pub fn bytes(count: f64) -> String {
    if !count.is_finite() {
        return "-".to_owned();
    }
    let (mut value, mut unit) = (count, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value.abs() < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    match unit {
        "B" => format!("{value:.0} B"),
        _ => format!("{} {unit}", plain(value)),
    }
}

/// Returns a size as paths of URLs and names of benchmarks have it: in MiB (`1m`) or KiB (`16k`) if it is a multiple,
/// else in bytes (`100`).
#[must_use]
pub fn size_name(bytes: u64) -> String {
    match bytes {
        _ if bytes > 0 && bytes.is_multiple_of(1 << 20) => format!("{}m", bytes >> 20),
        _ if bytes > 0 && bytes.is_multiple_of(1 << 10) => format!("{}k", bytes >> 10),
        _ => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_follow_the_size() {
        let cases = [(0.0, "0"), (0.123, "0.12"), (3.456, "3.46"), (67.84, "67.8"), (999.6, "1,000")];
        for (value, text) in cases.into_iter().chain([(-1_234_567.0, "-1,234,567"), (f64::NAN, "-")]) {
            assert_eq!(plain(value), text);
        }
    }

    #[test]
    fn bytes_have_binary_units() {
        for (count, text) in [(0.0, "0 B"), (1023.0, "1023 B"), (65536.0, "64.0 KiB"), (1_572_864.0, "1.50 MiB")] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn sizes_are_called_as_in_cases() {
        for (bytes, name) in [(1024, "1k"), (65536, "64k"), (1 << 20, "1m"), (64 << 20, "64m"), (100, "100"), (0, "0")]
        {
            assert_eq!(size_name(bytes), name);
        }
    }
}
