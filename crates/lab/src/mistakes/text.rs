//! Changes to the texts of the configurations of agents (Shunt's daemons) and of nginx.

use crate::host::{Host, Role};

/// Changes the text of a configuration if its host has this role. Other hosts' texts stay as they are.
pub(super) fn at(role: Role, host: &Host, text: String, change: impl FnOnce(&str) -> String) -> String {
    if host.role() == role { change(&text) } else { text }
}

/// Returns the text with another value in each line `key = ...`.
///
/// # Panics
/// When there is no such line: without a change there would be no mistake to test.
pub(super) fn set(text: &str, key: &str, value: &str) -> String {
    let is = |line: &&str| line.split_once(" = ").is_some_and(|(name, _)| name == key);
    assert!(text.lines().any(|line| is(&line)), "no line sets {key}:\n{text}");
    text.lines().map(|line| if is(&line) { format!("{key} = {value}\n") } else { format!("{line}\n") }).collect()
}

/// Returns the text without the lines that begin with `word`.
///
/// # Panics
/// When the text does not contain the word.
pub(super) fn without(text: &str, word: &str) -> String {
    assert!(text.contains(word), "nothing to take out: {word}\n{text}");
    text.lines().filter(|line| !line.trim_start().starts_with(word)).map(|line| format!("{line}\n")).collect()
}

/// Returns the text with one part replaced by another.
///
/// # Panics
/// When the text does not contain the part.
pub(super) fn swap(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "nothing to replace: {from}\n{text}");
    text.replace(from, to)
}

/// Returns the value of a line `key = "..."`.
///
/// # Panics
/// When there is no such line.
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
