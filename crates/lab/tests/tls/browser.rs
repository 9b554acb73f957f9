//! Test with a browser: headless Chromium loads a page of fifty images, then fetches each of them again and reports its
//! hash. A body takes the *shortcut* if the backend sends it straight to the client.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use shunt_lab::{Host, Lab, Options, Role, Settings};

use crate::bed::{Before, FILES};
use crate::service::{Running, needs_root, same_file, start_on};

const IMAGES: usize = 50;
/// Width in pixels of 3 bytes each. Rows of this width need no padding.
const WIDTH: usize = 64;
/// Heights of the images in pixels, in turn. Their bodies have about 1 KiB to 4 MiB.
const HEIGHTS: [usize; 5] = [6, 85, 350, 2000, 21_800];

/// Returns an uncompressed bitmap image (BITMAPINFOHEADER). Its pixels depend on `number`.
fn bitmap(number: usize, height: usize) -> Vec<u8> {
    let pixels = WIDTH * 3 * height;
    let mut image = b"BM".to_vec();
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    image.extend(words(&[54 + pixels as u32, 0, 54, 40, WIDTH as u32, height as u32, 1 | 24 << 16, 0]));
    image.extend(words(&[pixels as u32, 2835, 2835, 0, 0]));
    let mut state = number as u32 + 1;
    image.extend(
        std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .take(pixels),
    );
    image
}

/// Returns the page. Its script writes into the page, for each image, the width and the hash of the file.
fn page() -> String {
    let images: String = (0..IMAGES).map(|number| format!("<img src=\"image{number}\">\n")).collect();
    format!(
        r#"<!doctype html>
{images}<pre id="found"></pre>
<script>
addEventListener("load", async () => {{
    const found = [];
    for (const image of document.images) {{
        const answer = await fetch(image.src, {{ cache: "no-store" }});
        const hash = await crypto.subtle.digest("SHA-256", await answer.arrayBuffer());
        const hex = Array.from(new Uint8Array(hash), byte => byte.toString(16).padStart(2, "0")).join("");
        found.push(`${{new URL(image.src).pathname.slice(1)}} ${{image.naturalWidth}} ${{hex}}`);
    }}
    document.getElementById("found").textContent = found.join("\n") + "\nall";
}});
</script>
"#
    )
}

/// Returns configuration of the backend's nginx that sets the content type of HTML files. Without this type, a browser
/// would not show the page.
fn types(_: &Lab, host: &Host) -> String {
    match host.role() {
        Role::Backend => "        types { text/html html; }\n".to_owned(),
        _ => String::new(),
    }
}

fn write_site(directory: &Path) -> Result<()> {
    for number in 0..IMAGES {
        std::fs::write(directory.join(format!("image{number}")), bitmap(number, HEIGHTS[number % HEIGHTS.len()]))?;
    }
    std::fs::write(directory.join("page.html"), page()).context("writing the page")
}

/// Returns the hash of the frontend's public key, by which Chromium is told to trust it.
fn key_hash(service: &Running<'_>) -> Result<String> {
    let certificate = service.lab.frontend().dir().join("tls/frontend.pem");
    let mut shell = Command::new("sh");
    let script = "openssl x509 -in \"$1\" -pubkey -noout | openssl pkey -pubin -outform der |
        openssl dgst -sha256 -binary | base64";
    let output = shell.args(["-c", script, "sh"]).arg(certificate).output()?;
    ensure!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Loads a page in Chromium. Returns the document as it is when the page's script has ended.
fn browse(service: &Running<'_>, path: &str) -> Result<String> {
    let profile = tempfile::tempdir()?;
    let mut chromium = Command::new("timeout");
    // The namespace has neither a desktop nor an ordinary user. The virtual time budget, in ms, passes only while
    // nothing is loading.
    chromium.args(["240", "chromium-headless-shell", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
    chromium.args(["--dump-dom", "--virtual-time-budget=600000", "--timeout=200000"]);
    chromium.arg(format!("--user-data-dir={}", profile.path().display()));
    chromium.arg(format!("--ignore-certificate-errors-spki-list={}", key_hash(service)?));
    chromium.arg(format!("https://{}/{path}", service.lab.frontend().address()));
    service.lab.client().check(chromium).context("Chromium (Debian: chromium-headless-shell; scripts/install-packages)")
}

#[test]
fn chromium_on_a_page_of_fifty_images() -> Result<()> {
    needs_root();
    let settings = Settings { tls: Some(""), locations: Some(types), ..Settings::default() };
    let options = Options { offer_min: Some(1 << 10), settings, ..Options::shunt() };
    start_on(Lab::builder().intermediates(1), FILES, options, |service| {
        write_site(&service.files)?;
        let before = Before::of(service)?;
        let document = browse(service, "page.html")?;
        let counted = before.counted(service)?;
        let found: BTreeMap<&str, (&str, &str)> = document
            .lines()
            .filter_map(|line| {
                let line = line.strip_prefix("<pre id=\"found\">").unwrap_or(line);
                let (image, rest) = line.split_once(' ')?;
                image.starts_with("image").then_some((image, rest.split_once(' ')?))
            })
            .collect();
        ensure!(document.contains("\nall</pre>"), "the page did not come to its end:\n{document}");
        for number in 0..IMAGES {
            let name = format!("image{number}");
            let (width, hash) = found.get(name.as_str()).with_context(|| format!("{name} is not in:\n{document}"))?;
            ensure!(*width == WIDTH.to_string(), "{name} is {width} pixels wide to Chromium");
            same_file(&service.files, &name, hash)?;
        }
        // Each image is fetched twice: for the page and for its hash. There may be one more shortcut, for the page.
        ensure!(counted.grown("shortcuts") >= 2 * IMAGES as u64, "{} shortcuts", counted.grown("shortcuts"));
        service.no_fallback()
    })
}
