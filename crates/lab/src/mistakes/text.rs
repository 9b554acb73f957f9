//! Changes to the texts of configurations: those of agents and of nginx.

use crate::host::{Host, Role};

/// Changes the text of hosts of one role.
pub(super) fn at(role: Role, host: &Host, text: String, change: impl FnOnce(&str) -> String) -> String {
    if host.role() == role { change(&text) } else { text }
}

/// The text with another value in each line `key = ...`.
///
/// # Panics
/// Where there is no such line: the row would make no mistake.
pub(super) fn set(text: &str, key: &str, value: &str) -> String {
    let is = |line: &&str| line.split_once(" = ").is_some_and(|(name, _)| name == key);
    assert!(text.lines().any(|line| is(&line)), "no line sets {key}:\n{text}");
    text.lines().map(|line| if is(&line) { format!("{key} = {value}\n") } else { format!("{line}\n") }).collect()
}

/// The text without lines that begin with a word.
///
/// # Panics
/// Where there is none.
pub(super) fn without(text: &str, word: &str) -> String {
    assert!(text.contains(word), "nothing to take out: {word}\n{text}");
    text.lines().filter(|line| !line.trim_start().starts_with(word)).map(|line| format!("{line}\n")).collect()
}

/// The text with one part in another's place.
///
/// # Panics
/// Where that is not there.
pub(super) fn swap(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "nothing to replace: {from}\n{text}");
    text.replace(from, to)
}

/// The value of a line `key = "..."`.
///
/// # Panics
/// Where there is no such line.
pub(super) fn value<'a>(text: &'a str, key: &str) -> &'a str {
    let found = text.lines().find_map(|line| line.split_once(" = ").filter(|(name, _)| *name == key));
    found.map_or_else(|| panic!("no line sets {key}:\n{text}"), |(_, value)| value.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_lines_change() {
        let text = "name = \"a\"\nnames = \"b\"\n";
        assert_eq!(set(text, "name", "1"), "name = 1\nnames = \"b\"\n");
        assert_eq!(without(text, "names"), "name = \"a\"\n");
        assert_eq!(value(text, "names"), "b");
        assert_eq!(swap(text, "\"a\"", "2"), "name = 2\nnames = \"b\"\n");
    }
}
