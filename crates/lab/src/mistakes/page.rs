//! The table in the form of docs/mistakes.md.

use std::fmt::Write as _;

use super::{KNOWN, Teller, all};

/// Table of all mistakes: for each, the words that the operator reads, and what becomes of bodies.
#[must_use]
pub fn page() -> String {
    let mut page =
        "| mistake | what is wrong | who says it | in a line with | bodies |\n| --- | --- | --- | --- | --- |\n"
            .to_owned();
    for row in all() {
        let says = match row.teller {
            Teller::Nobody => String::new(),
            _ => row.says.iter().map(|part| format!("`{part}`")).collect::<Vec<_>>().join(" … "),
        };
        let failing = if KNOWN.iter().any(|known| known.name == row.name) { " (not yet)" } else { "" };
        let _ = writeln!(page, "| {}{failing} | {} | {} | {says} | {} |", row.name, row.what, row.teller, row.bodies);
    }
    page
}

/// List of the rows that fail, and what is seen instead.
#[must_use]
pub fn not_yet() -> String {
    KNOWN.iter().map(|known| format!("- {}: {}\n", known.name, known.seen)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{KNOWN, all};
    use super::{not_yet, page};

    #[test]
    fn the_operators_page_has_this_table() {
        let docs = include_str!("../../../../docs/mistakes.md");
        assert!(docs.contains(&page()), "docs/mistakes.md is to have this table:\n{}", page());
        assert!(docs.contains(&not_yet()), "docs/mistakes.md is to have this list:\n{}", not_yet());
    }

    #[test]
    fn rows_have_names_of_their_own_and_what_fails_is_one_of_them() {
        let mut names: Vec<&str> = all().iter().map(|row| row.name).collect();
        assert!(names.len() >= 25, "{} rows", names.len());
        assert!(KNOWN.iter().all(|known| names.contains(&known.name)), "{KNOWN:?}");
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }
}
