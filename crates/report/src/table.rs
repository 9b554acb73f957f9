//! Tables for a terminal, with colours where they are wanted (https://no-color.org).

use std::fmt::Write as _;
use std::io::IsTerminal;

/// Whether to write colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint(bool);

impl Paint {
    /// Decides on colours: they are written if `stream` is a terminal, and `NO_COLOR` is unset or empty.
    #[must_use]
    pub fn of(stream: &impl IsTerminal) -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self(!refused && stream.is_terminal())
    }

    #[must_use]
    pub fn never() -> Self {
        Self(false)
    }

    #[must_use]
    pub fn always() -> Self {
        Self(true)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    #[must_use]
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    #[must_use]
    pub fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    #[must_use]
    pub fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    #[must_use]
    pub fn bad(self, text: &str) -> String {
        self.with("31", text)
    }
}

/// Alignment of a column's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Rows of cells under a heading.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    #[must_use]
    pub fn new(columns: &[(&str, Align)]) -> Self {
        Self { columns: columns.iter().map(|(name, align)| ((*name).to_owned(), *align)).collect(), rows: Vec::new() }
    }

    /// Adds a row; cells may contain colours.
    ///
    /// # Panics
    /// Panics if the row has more or fewer cells than the table has columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    #[must_use]
    pub fn show(&self, paint: Paint) -> String {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| {
                let cells = self.rows.iter().map(|row| width(&row[at]));
                cells.chain([width(&self.columns[at].0)]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: &mut dyn Iterator<Item = &String>| {
            let padded = cells.zip(&widths).zip(&self.columns).map(|((cell, width_wanted), (_, align))| {
                let padding = " ".repeat(width_wanted - width(cell));
                if *align == Align::Left { format!("{cell}{padding}") } else { format!("{padding}{cell}") }
            });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        let heading = line(&mut self.columns.iter().map(|(name, _)| name));
        let mut text = format!("{}\n", paint.bold(&heading));
        for row in &self.rows {
            let _ = writeln!(text, "{}", line(&mut row.iter()));
        }
        text
    }
}

/// Returns the number of characters that take up space. The escape sequences of colours do not.
fn width(text: &str) -> usize {
    let mut in_escape = false;
    let shown = text.chars().filter(|&c| {
        let counts = !in_escape && c != '\x1b';
        in_escape = if in_escape { c != 'm' } else { c == '\x1b' };
        counts
    });
    shown.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[("tier", Align::Left), ("bytes", Align::Right)]);
        table.row(["frontend".to_owned(), "7".to_owned()]);
        table.row(["is".to_owned(), Paint::always().good("1,234,567")]);
        table
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = table().show(Paint::never());
        let plain = text.replace("\x1b[32m", "").replace("\x1b[0m", "");
        assert_eq!(plain, "tier          bytes\nfrontend          7\nis        1,234,567\n");
    }

    #[test]
    fn no_colour_is_written_unless_asked() {
        assert_eq!(Paint::never().bad("x"), "x");
        assert_eq!(Paint::always().bad("x"), "\x1b[31mx\x1b[0m");
        assert_eq!(width("\x1b[31mxy\x1b[0mz"), 3);
    }

    #[test]
    #[should_panic(expected = "a cell for each column")]
    fn a_short_row_is_a_mistake() {
        table().row(["x".to_owned()]);
    }
}
