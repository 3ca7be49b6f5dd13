//! Requests to LLM APIs and their responses: any bytes are read, and cuts do not change what is measured.

use sluicegate::payload::llm::request;
use sluicegate::payload::llm::response::{ResponseMeter, UsageFormat, is_usage_event};

/// The first byte chooses the media type and where the response is cut. The rest is a request and a response.
pub(crate) fn run(data: &[u8]) {
    let [choice, rest @ ..] = data else { return };
    if let Ok(info) = request::inspect(rest) {
        assert!(info.choices > 0 && info.text_bytes <= rest.len() as u64, "{info:?}");
        // A body that is accepted has one meaning for every reader of JSON.
        let value: serde_json::Value = serde_json::from_slice(rest).expect("JSON");
        if let Some(bound) = value["max_tokens"].as_u64().filter(|bound| *bound > 0) {
            assert!(info.bounds.root.is_some_and(|found| found >= bound), "{info:?} has less than {bound}");
        }
        let changed = request::inspect(&request::with_usage_option(rest)).expect("still a request");
        assert_eq!((changed.includes_usage, changed.bounds), (true, info.bounds));
    }
    is_usage_event(rest);
    let media_type = if choice % 2 == 0 { "text/event-stream" } else { "application/json" };
    let measure = |parts: &mut dyn Iterator<Item = &[u8]>| {
        let mut meter = ResponseMeter::new(media_type, UsageFormat::Auto, 4).expect("JSON");
        parts.for_each(|part| meter.feed(part));
        (meter.usage(7), meter.min_output())
    };
    let whole = measure(&mut std::iter::once(rest));
    let length = usize::from(*choice / 2) % 16 + 1;
    assert_eq!(measure(&mut rest.chunks(length)), whole, "cut into parts of {length}");
}
