//! Requests to LLM APIs and their responses: no bytes cause a panic, and the measured usage does not depend on how a
//! response is split.

use sluicegate::payload::llm::request;
use sluicegate::payload::llm::response::{PriceFacts, ResponseMeter, UsageFormat, is_usage_event};

/// The first byte of the input selects the media type and the size of the response's parts. The other bytes are parsed
/// as a request and as a response.
pub(crate) fn run(data: &[u8]) {
    let [choice, rest @ ..] = data else { return };
    if let Ok(info) = request::inspect(rest) {
        assert!(info.choices > 0 && info.text_bytes <= rest.len() as u64, "{info:?}");
        // serde_json must accept each body that the gateway accepts.
        let value: serde_json::Value = serde_json::from_slice(rest).expect("JSON");
        if let Some(bound) = value["max_tokens"].as_u64().filter(|bound| *bound > 0) {
            assert!(info.bounds.root.is_some_and(|found| found >= bound), "{info:?} has less than {bound}");
        }
        let changed = request::inspect(&request::with_usage_option(rest)).expect("the request stays valid");
        assert_eq!((changed.includes_usage, changed.bounds), (true, info.bounds));
    }
    is_usage_event(rest);
    let media_type = if choice % 2 == 0 { "text/event-stream" } else { "application/json" };
    let measure = |parts: &mut dyn Iterator<Item = &[u8]>| {
        let mut meter = ResponseMeter::new(media_type, UsageFormat::Auto, 4, PriceFacts::Read).expect("JSON");
        parts.for_each(|part| meter.feed(part));
        (meter.usage(7), meter.min_output())
    };
    let whole = measure(&mut std::iter::once(rest));
    let length = usize::from(*choice / 2) % 16 + 1;
    assert_eq!(measure(&mut rest.chunks(length)), whole, "the response is split into parts of {length} bytes");
}
