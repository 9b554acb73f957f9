//! Horizontal bars as SVG: a picture is a grid of panels, a panel has rows, a row one bar per series.
//!
//! ```text
//!  title
//!  subtitle                                   # plain nginx  # Shunt
//!  panel                      panel
//!  frontend  ##########  68   frontend  ###########
//!            ####  24                   ##
//! ```

use std::fmt::Write as _;

/// Series of bars, with its name and colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Series {
    pub name: &'static str,
    pub colour: &'static str,
}

pub const PLAIN: Series = Series { name: "plain nginx", colour: "#98a4b3" };
pub const SHUNT: Series = Series { name: "Shunt", colour: "#0a7d74" };
pub const HAPROXY: Series = Series { name: "HAProxy, splicing", colour: "#d8a13a" };
pub const LIMIT: Series = Series { name: "physical limit", colour: "#c9d6df" };

/// All series, in the order of the legend.
const ALL: [Series; 4] = [PLAIN, HAPROXY, SHUNT, LIMIT];

/// Value for which a bar has the full length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// The panel's largest value: bars of different rows can be compared.
    Panel,
    /// Each row's largest value: only the bars of one row can be compared.
    Row,
}

/// Bars that belong together, under one label.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub label: String,
    /// Series and value of each bar.
    pub bars: Vec<(Series, f64)>,
    /// Value at which a line crosses the row: a target.
    pub mark: Option<f64>,
}

/// Rows under one title.
#[derive(Debug, Clone)]
pub struct Panel {
    pub title: String,
    pub rows: Vec<Row>,
    pub scale: Scale,
    /// Function that formats values.
    pub show: fn(f64) -> String,
}

#[derive(Debug, Clone)]
pub struct Picture {
    pub title: String,
    pub subtitle: String,
    pub panels: Vec<Panel>,
    /// Number of panels side by side.
    pub columns: usize,
}

const PANEL_WIDTH: f64 = 470.0;
const LABEL_WIDTH: f64 = 132.0;
const VALUE_WIDTH: f64 = 78.0;
const BAR_HEIGHT: f64 = 15.0;
const ROW_GAP: f64 = 12.0;
const PANEL_HEAD: f64 = 34.0;
const MARGIN: f64 = 28.0;

const STYLE: &str = "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1d2733}\
    .title{font-size:20px;font-weight:650}.sub{font-size:13px;fill:#5b6876}.panel{font-size:14px;font-weight:600}\
    .label{font-size:12.5px}.value{font-size:11.5px;fill:#3c4957}";

impl Picture {
    /// The whole picture as an SVG document.
    #[must_use]
    pub fn svg(&self) -> String {
        let columns = self.columns.clamp(1, self.panels.len().max(1));
        let rows: Vec<&[Panel]> = self.panels.chunks(columns).collect();
        let heights: Vec<f64> =
            rows.iter().map(|row| row.iter().map(Panel::height).fold(0.0, f64::max) + MARGIN).collect();
        let head = if self.subtitle.is_empty() { 62.0 } else { 84.0 };
        let width = MARGIN + (PANEL_WIDTH + MARGIN) * columns as f64;
        let height = head + heights.iter().sum::<f64>() + MARGIN / 2.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{title}\">\n<style>{STYLE}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
             <text class=\"title\" x=\"{MARGIN}\" y=\"38\">{title}</text>\n\
             <text class=\"sub\" x=\"{MARGIN}\" y=\"60\">{subtitle}</text>\n",
            title = escape(&self.title),
            subtitle = escape(&self.subtitle),
        );
        self.legend(&mut svg, width);
        let mut top = head;
        for (row, height) in rows.iter().zip(&heights) {
            for (column, panel) in row.iter().enumerate() {
                panel.draw(&mut svg, MARGIN + (PANEL_WIDTH + MARGIN) * column as f64, top);
            }
            top += height;
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn series(&self) -> impl DoubleEndedIterator<Item = Series> {
        let rows = || self.panels.iter().flat_map(|panel| &panel.rows);
        ALL.into_iter().filter(move |series| rows().any(|row| row.bars.iter().any(|(one, _)| one == series)))
    }

    /// Draws the legend at the right end of the title's line.
    fn legend(&self, svg: &mut String, width: f64) {
        let mut right = width - MARGIN;
        for Series { name, colour } in self.series().rev() {
            right -= 7.0 * name.len() as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{:.0}\" y=\"28\" width=\"11\" height=\"11\" rx=\"2\" fill=\"{colour}\"/>\
                 <text class=\"label\" x=\"{right:.0}\" y=\"38\">{}</text>",
                right - 17.0,
                escape(name)
            );
            right -= 34.0;
        }
    }
}

impl Row {
    fn largest(&self) -> f64 {
        let values = self.bars.iter().map(|(_, value)| *value).chain(self.mark);
        values.filter(|value| value.is_finite()).fold(f64::MIN_POSITIVE, f64::max)
    }

    fn height(&self) -> f64 {
        BAR_HEIGHT * self.bars.len() as f64 + ROW_GAP
    }

    /// Draws the row. `scale` is the length of a bar of value 1.
    fn draw(&self, svg: &mut String, left: f64, top: f64, scale: f64, show: fn(f64) -> String) {
        let bars_height = self.height() - ROW_GAP;
        let _ = writeln!(
            svg,
            "<text class=\"label\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            left - 10.0,
            top + bars_height / 2.0 + 4.0,
            escape(&self.label)
        );
        for (at, (series, value)) in self.bars.iter().enumerate() {
            let value = if value.is_finite() { *value } else { 0.0 };
            let (length, bar_top) = ((value.max(0.0) * scale).max(1.5), top + BAR_HEIGHT * at as f64);
            let _ = writeln!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{bar_top:.1}\" width=\"{length:.1}\" height=\"{:.1}\" rx=\"2\" \
                 fill=\"{}\"/><text class=\"value\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                BAR_HEIGHT - 2.0,
                series.colour,
                left + length + 6.0,
                bar_top + BAR_HEIGHT - 4.5,
                escape(&show(value))
            );
        }
        if let Some(mark) = self.mark {
            let x = left + mark * scale;
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#c0392b\" \
                 stroke-width=\"2\"/>",
                top - 3.0,
                top + bars_height + 1.0
            );
        }
    }
}

impl Panel {
    fn height(&self) -> f64 {
        PANEL_HEAD + self.rows.iter().map(Row::height).sum::<f64>()
    }

    fn draw(&self, svg: &mut String, left: f64, top: f64) {
        let largest = self.rows.iter().map(Row::largest).fold(f64::MIN_POSITIVE, f64::max);
        let origin = left + LABEL_WIDTH;
        let _ = writeln!(
            svg,
            "<text class=\"panel\" x=\"{left:.1}\" y=\"{:.1}\">{}</text>",
            top + 16.0,
            escape(&self.title)
        );
        let mut y = top + PANEL_HEAD;
        for row in &self.rows {
            let longest = if self.scale == Scale::Panel { largest } else { row.largest() };
            let scale = (PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH) / longest;
            row.draw(svg, origin, y, scale, self.show);
            y += row.height();
        }
        let _ = writeln!(
            svg,
            "<line x1=\"{origin:.1}\" x2=\"{origin:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#5b6876\"/>",
            top + PANEL_HEAD - 5.0,
            y - ROW_GAP + 5.0
        );
    }
}

/// Escapes text for SVG and HTML.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::number::plain;

    fn picture(values: [f64; 2]) -> Picture {
        let row = Row { label: "a<b".to_owned(), bars: vec![(PLAIN, values[0]), (SHUNT, values[1])], mark: Some(1.0) };
        let panel = Panel { title: "CPU & bytes".to_owned(), rows: vec![row], scale: Scale::Panel, show: plain };
        Picture { title: "x".to_owned(), subtitle: String::new(), panels: vec![panel], columns: 2 }
    }

    /// Checks that every tag that opens also closes, in order.
    fn assert_balanced(svg: &str) {
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let tag = tag.split('>').next().unwrap();
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop().as_deref(), Some(name), "{svg}"),
                None if tag.ends_with('/') => {}
                None => open.push(tag.split(' ').next().unwrap().to_owned()),
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn a_picture_is_well_formed_and_says_its_numbers() {
        let svg = picture([68.0, 24.0]).svg();
        assert_balanced(&svg);
        for text in ["a&lt;b", "CPU &amp; bytes", ">68.0<", ">24.0<", "plain nginx", SHUNT.colour] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn values_that_are_no_numbers_draw_no_nonsense() {
        for values in [[f64::NAN, 1.0], [0.0, 0.0], [f64::INFINITY, -3.0]] {
            let svg = picture(values).svg();
            assert_balanced(&svg);
            assert!(!svg.contains("NaN") && !svg.contains("inf\"") && !svg.contains("width=\"-"), "{svg}");
        }
    }

    #[test]
    fn the_longest_bar_fills_its_place() {
        let full = format!("width=\"{:.1}\"", PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH);
        let mut picture = picture([50.0, 100.0]);
        let mut longer = picture.panels[0].rows[0].clone();
        longer.bars[1].1 = 1000.0;
        picture.panels[0].rows.push(longer);
        assert_eq!(picture.svg().matches(&full).count(), 1);
        picture.panels[0].scale = Scale::Row;
        assert_eq!(picture.svg().matches(&full).count(), 2);
    }
}
