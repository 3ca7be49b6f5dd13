//! Times and sizes in the notation of other programs.

/// Return a time of nginx (`60s`, `1h 30m`, `500ms`) in milliseconds.
pub(super) fn milliseconds(text: &str) -> Option<u64> {
    let mut total = 0_u64;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, after) = rest.split_at_checked(digits)?;
        let unit_length = after.len() - after.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
        let (unit, after) = after.split_at_checked(unit_length)?;
        let factor = match unit {
            "ms" => 1,
            "" | "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 604_800_000,
            _ => return None,
        };
        total = total.checked_add(number.parse::<u64>().ok()?.checked_mul(factor)?)?;
        rest = after.trim_start();
    }
    Some(total)
}

/// Return a duration in the notation of the configuration.
pub(super) fn duration(milliseconds: u64) -> String {
    match milliseconds {
        ms if ms >= 1000 && ms.is_multiple_of(1000) => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    }
}

/// Return a size of nginx (`50m`) in the notation of the configuration.
pub(super) fn size(text: &str) -> Option<String> {
    let unit = match text.chars().last()?.to_ascii_lowercase() {
        'k' => "KiB",
        'm' => "MiB",
        'g' => "GiB",
        _ => "B",
    };
    let number: u64 = text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse().ok()?;
    Some(format!("{number}{unit}"))
}
