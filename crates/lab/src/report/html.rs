//! A self-contained page: headings, tables and inline pictures. It loads nothing.

use std::fmt::Write as _;

use super::chart::escape;

/// A page that parts are appended to.
#[derive(Debug, Clone)]
pub struct Page {
    title: String,
    body: String,
}

/// Appearance of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Look {
    #[default]
    Text,
    Number,
    Good,
    Bad,
}

const STYLE: &str = "body{font:15px/1.5 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;color:#1d2733;\
    max-width:1080px;margin:2.5em auto;padding:0 1.5em}h1{font-size:26px}h2{font-size:19px;margin-top:2.2em}\
    p{max-width:52em}table{border-collapse:collapse;margin:1em 0;font-size:13.5px}\
    th,td{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid #e4e9ee}\
    .n{text-align:right;font-variant-numeric:tabular-nums}.good{color:#0a7d4a;font-weight:600}\
    .bad{color:#c0392b;font-weight:600}svg{max-width:100%;height:auto}code{font-size:13px}";

impl Page {
    #[must_use]
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), body: format!("<h1>{}</h1>\n", escape(title)) }
    }

    pub fn heading(&mut self, text: &str) {
        let _ = writeln!(self.body, "<h2>{}</h2>", escape(text));
    }

    pub fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", escape(text));
    }

    /// Adds SVG without escaping it.
    pub fn picture(&mut self, svg: &str) {
        let _ = writeln!(self.body, "<figure style=\"margin:1em 0\">{svg}</figure>");
    }

    pub fn table(&mut self, columns: &[(&str, Look)], rows: &[Vec<(String, Look)>]) {
        let cell = |tag: &str, text: &str, look: Look| {
            let class = match look {
                Look::Text => "",
                Look::Number => " class=\"n\"",
                Look::Good => " class=\"good\"",
                Look::Bad => " class=\"bad\"",
            };
            format!("<{tag}{class}>{}</{tag}>", escape(text))
        };
        let heads: String = columns.iter().map(|(name, look)| cell("th", name, *look)).collect();
        let _ = writeln!(self.body, "<table>\n<tr>{heads}</tr>");
        for row in rows {
            let cells: String = row.iter().map(|(text, look)| cell("td", text, *look)).collect();
            let _ = writeln!(self.body, "<tr>{cells}</tr>");
        }
        self.body.push_str("</table>\n");
    }

    #[must_use]
    pub fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width\">\n<title>{}</title>\n<style>{STYLE}</style>\n<body>\n{}</body>\n</html>\n",
            escape(&self.title),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_pictures_are_not() {
        let mut page = Page::new("a & b");
        page.picture("<svg></svg>");
        page.table(
            &[("x", Look::Text), ("y", Look::Number)],
            &[vec![("<1>".to_owned(), Look::Text), ("2".to_owned(), Look::Good)]],
        );
        let html = page.html();
        assert!(html.contains("<svg></svg>") && html.contains("&lt;1&gt;") && html.contains("a &amp; b"));
        assert!(html.contains("<th class=\"n\">y</th>") && html.contains("<td class=\"good\">2</td>"));
    }
}
