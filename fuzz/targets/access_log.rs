//! Parsers of access logs: the result for a line does not depend on other lines, and the parsed values occur in the
//! line.

use sluicegate::tools::replay::format::Format;

const NGINX: &str =
    r#"$msec $remote_addr $host "$request" $status $request_time "$http_x_api_key" "$http_x_forwarded_for""#;

const FORMATS: [&str; 7] = ["common", "combined", "caddy", "alb", "cloudfront", "sluicegate", NGINX];

pub(crate) fn run(data: &[u8]) {
    let Some((format, text)) = data.split_first() else { return };
    let name = FORMATS[usize::from(*format) % FORMATS.len()];
    let mut format = Format::from_name(name).expect("a known format");
    let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    let _ = Format::detect(&lines);
    let _ = format.capabilities(&lines);
    for line in lines {
        let first = format.parse(line).map(|entry| entry.map(|entry| format!("{entry:?}")));
        // Parse the line again: the result must not depend on the line that was parsed before.
        let again = format.parse(line).map(|entry| entry.map(|entry| format!("{entry:?}")));
        assert_eq!(first, again, "{name}: {}", line.escape_ascii());
        let Ok(Some(entry)) = format.parse(line) else { continue };
        assert!(entry.time_us <= 253_402_300_800_000_000, "{name}: {}", line.escape_ascii());
        let stands = |part: &[u8]| part.is_empty() || line.windows(part.len()).any(|window| window == part);
        // Values with escapes are decoded, so they do not occur in the line.
        if line.contains(&b'\\') {
            continue;
        }
        assert!(stands(entry.method), "{name}: {}", line.escape_ascii());
        // CloudFront logs have separate columns for the path and the query.
        if name != "cloudfront" {
            assert!(stands(&entry.target), "{name}: {}", line.escape_ascii());
            assert!(entry.host.as_deref().is_none_or(stands), "{name}: {}", line.escape_ascii());
        }
    }
}
