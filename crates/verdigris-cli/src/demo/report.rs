//! The page that `--report` writes: one file that needs no other.

use std::fmt::Write as _;

use super::data::{CLASSES, Digit, SIDE};
use super::digits::{Arguments, ENGINE_HEAD, Outcome, engine_rows};
use verdigris_cli::table::Align;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}table{border-collapse:collapse}\
td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #ddd}td.r,th.r{text-align:right;font-variant-numeric:tabular-nums}\
figure{display:inline-block;margin:0 1rem 1rem 0;text-align:center}figcaption{font-size:.85rem}\
.k{display:grid;grid-template-columns:max-content auto;gap:.1rem 1.5rem}.wrong{color:#b00020;font-weight:bold}.scroll{overflow-x:auto}";

/// The whole page.
pub(super) fn page(arguments: &Arguments, outcome: &Outcome) -> String {
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>Verdigris: digits</title>\n<style>{STYLE}</style>\n\
         <h1>Handwritten digits, read by a small convolutional network</h1>\n"
    );
    let facts = [
        ("device", outcome.device.clone()),
        ("precision", format!("{:?}", arguments.precision).to_lowercase()),
        ("seed", arguments.seed.to_string()),
        ("accuracy", format!("{:.2} % of {} images never seen", 100.0 * outcome.accuracy(), outcome.held_out())),
        ("training", format!("{:.1} s, {} epochs", outcome.training_time.as_secs_f64(), arguments.epochs)),
        ("speed", format!("{:.0} images/s", outcome.images_per_second())),
        ("made ready in", outcome.setup()),
        ("steps left out for overflow", outcome.skipped_steps.to_string()),
    ];
    html += "<div class=\"k\">";
    for (name, value) in facts {
        let _ = write!(html, "<span>{name}</span><b>{}</b>", escaped(&value));
    }
    html += "</div>\n<h2>Loss</h2>\n";
    html += &curve(&outcome.losses);
    let _ = writeln!(html, "<h2>Misread: {}</h2>", outcome.misread.len());
    for (digit, read) in &outcome.misread {
        let _ = writeln!(html, "<figure>{}<figcaption>{} read as {read}</figcaption></figure>", drawn(*digit), digit.label);
    }
    html += "<h2>Confusion</h2>\n<p>Rows are the digits, columns what they were read as.</p>\n<table><tr><th></th>";
    (0..CLASSES).for_each(|digit| html += &format!("<th class=\"r\">{digit}</th>"));
    html += "</tr>\n";
    for (digit, row) in outcome.confusion.iter().enumerate() {
        let _ = write!(html, "<tr><th>{digit}</th>");
        for (read, count) in row.iter().enumerate() {
            let class = if read != digit && *count > 0 { "r wrong" } else { "r" };
            let shown = if *count == 0 { "·".to_owned() } else { count.to_string() };
            let _ = write!(html, "<td class=\"{class}\">{shown}</td>");
        }
        html += "</tr>\n";
    }
    html += "</table>\n<h2>Engines</h2>\n<p>Times are means of one run of the graph.</p>\n<div class=\"scroll\"><table><tr>";
    let class = |align: Align| if align == Align::Right { " class=\"r\"" } else { "" };
    ENGINE_HEAD.iter().for_each(|(name, align)| html += &format!("<th{}>{name}</th>", class(*align)));
    html += "</tr>\n";
    for row in engine_rows(outcome) {
        html += "<tr>";
        row.iter().zip(ENGINE_HEAD).for_each(|(cell, (_, align))| html += &format!("<td{}>{}</td>", class(align), escaped(cell)));
        html += "</tr>\n";
    }
    html += "</table></div>\n<p>Images: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0.</p>\n</html>\n";
    html
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The losses as a line, on a logarithmic scale, with the decades drawn.
fn curve(losses: &[f32]) -> String {
    const WIDTH: f64 = 800.0;
    const HEIGHT: f64 = 240.0;
    let logarithms: Vec<f64> = losses.iter().map(|loss| f64::from(*loss).max(1e-6).log10()).filter(|value| value.is_finite()).collect();
    let low = logarithms.iter().copied().fold(f64::INFINITY, f64::min).floor();
    let high = logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max).ceil();
    if logarithms.len() < 2 || high <= low {
        return String::from("<p>Too few steps for a curve.</p>\n");
    }
    let y = |value: f64| HEIGHT * (high - value) / (high - low);
    let x = |i: usize| 40.0 + (WIDTH - 40.0) * i as f64 / (logarithms.len() - 1) as f64;
    let points: Vec<String> = logarithms.iter().enumerate().map(|(i, &value)| format!("{:.1},{:.1}", x(i), y(value))).collect();
    let mut svg = format!("<svg viewBox=\"0 -10 {WIDTH} {}\" width=\"100%\" role=\"img\" aria-label=\"loss by step\">", HEIGHT + 40.0);
    for decade in low as i32..=high as i32 {
        let at = y(f64::from(decade));
        let label = if decade >= 0 { format!("{}", 10f64.powi(decade)) } else { format!("{:.*}", -decade as usize, 10f64.powi(decade)) };
        let _ = write!(
            svg,
            "<line x1=\"40\" x2=\"{WIDTH}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"0\" y=\"{:.1}\" font-size=\"11\">{label}</text>",
            at + 4.0
        );
    }
    let _ = writeln!(
        svg,
        "<polyline fill=\"none\" stroke=\"#1b7f6b\" stroke-width=\"1\" points=\"{}\"/><text x=\"40\" y=\"{}\" font-size=\"11\">step 1</text>\
         <text x=\"{WIDTH}\" y=\"{}\" font-size=\"11\" text-anchor=\"end\">step {}</text></svg>",
        points.join(" "),
        HEIGHT + 18.0,
        HEIGHT + 18.0,
        logarithms.len()
    );
    svg
}

/// An image, a square a pixel.
fn drawn(digit: Digit) -> String {
    let mut svg = String::from(
        "<svg width=\"80\" height=\"80\" viewBox=\"0 0 8 8\" shape-rendering=\"crispEdges\"><rect width=\"8\" height=\"8\" fill=\"#fff\"/>",
    );
    for (i, &pixel) in digit.pixels.iter().enumerate().filter(|(_, pixel)| **pixel > 0) {
        let shade = 255 - 255 * u32::from(pixel) / 16;
        let _ = write!(svg, "<rect x=\"{}\" y=\"{}\" width=\"1\" height=\"1\" fill=\"rgb({shade},{shade},{shade})\"/>", i % SIDE, i / SIDE);
    }
    svg + "</svg>"
}
