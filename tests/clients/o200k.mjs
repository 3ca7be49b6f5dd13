// Writes tests/fixtures/o200k.json: texts with the number of their tokens in o200k, the tokenizer of OpenAI's models.
//
//     npm install --no-save gpt-tokenizer@4.0.0 && node tests/clients/o200k.mjs > tests/fixtures/o200k.json
//
// The texts in several languages are articles of the Universal Declaration of Human Rights and ordinary questions. The
// random texts have a fixed seed.
import { encode } from 'gpt-tokenizer/encoding/o200k_base';

let state = 7n;
const random = (count) => {
  state = (state * 6364136223846793005n + 1442695040888963407n) & ((1n << 64n) - 1n);
  return Number((state >> 33n) % BigInt(count));
};
const times = (count, make) => Array.from({ length: count }, make);
const bytes = (count) => Buffer.from(times(count, () => random(256)));
const uuid = () => bytes(16).toString('hex').replace(/(.{8})(.{4})(.{4})(.{4})(.{12})/, '$1-$2-$3-$4-$5');

const prose = {
  english: `All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience and should act towards one another in a spirit of brotherhood. Everyone is entitled to all the rights and freedoms set forth in this Declaration, without distinction of any kind.
Could you summarize this thread for my manager? She needs the three decisions we made, who owns each of them, and what could delay the release. Please keep it below two hundred words, and don't mention the customer by name.`,
  chinese: `人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。人人有资格享有本宣言所载的一切权利和自由，不分种族、肤色、性别、语言、宗教、政治或其他见解、国籍或社会出身、财产、出生或其他身分等任何区别。人人有权享有生命、自由和人身安全。任何人不得使为奴隶或奴役；一切形式的奴隶制度和奴隶买卖，均应予以禁止。
请帮我检查这段代码，它在服务器上运行得很慢，我不知道问题出在哪里。如果你需要更多的信息，请告诉我。`,
  japanese: `すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。すべて人は、人種、皮膚の色、性、言語、宗教、政治上その他の意見、国民的若しくは社会的出身、財産、門地その他の地位による差別をも受けることなく、この宣言に掲げるすべての権利と自由とを享有することができる。
この文章を英語に翻訳してください。丁寧な表現を使って、専門用語は説明を付けてください。`,
  russian: `Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью и должны поступать в отношении друг друга в духе братства. Каждый человек должен обладать всеми правами и всеми свободами, провозглашенными настоящей Декларацией, без какого бы то ни было различия, как-то в отношении расы, цвета кожи, пола, языка, религии, политических или иных убеждений.
Пожалуйста, объясни, почему этот запрос выполняется так долго и как его можно ускорить, не меняя структуру таблицы.`,
  hindi: `सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें बुद्धि और अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए। हर एक को इस घोषणा में सन्निहित सभी अधिकारों और आज़ादियों को प्राप्त करने का हक है और इस मामले में जाति, वर्ण, लिंग, भाषा, धर्म, राजनीति या अन्य विचार के कारण भेदभाव का विचार न किया जाएगा।
कृपया मुझे बताइए कि इस सप्ताह दिल्ली में मौसम कैसा रहेगा और क्या मुझे छाता लेकर जाना चाहिए।`,
  german: `Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen. Kannst du mir erklären, warum die Rechnung vom letzten Monat höher ist, und was ich tun muss, um den Vertrag zu kündigen?`,
  spanish: `Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y conciencia, deben comportarse fraternalmente los unos con los otros. Necesito un correo para un cliente que ha recibido el pedido con dos semanas de retraso y quiere que le devuelvan el dinero.`,
  korean: `모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다. 이번 주 회의 내용을 요약해서 팀원들에게 보낼 이메일을 작성해 주세요.`,
};
const code = {
  rust: `/// Return the number of tokens that remain.\nfn remaining(&self, now: u64) -> u64 {\n    let elapsed = now.saturating_sub(self.updated);\n    let refilled = self.tokens + elapsed * self.rate / SECOND;\n    match refilled.checked_sub(self.cost) {\n        Some(rest) if rest <= self.burst => rest,\n        Some(_) => self.burst,\n        None => 0,\n    }\n}\n\nimpl Display for Quota {\n    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {\n        write!(f, "{}/{}", self.limit, self.window)\n    }\n}\n`,
  python: `import json\nfrom pathlib import Path\n\n\nclass Report:\n    """Collects the results of a run."""\n\n    def __init__(self, directory: Path):\n        self.directory = directory\n        self.results: dict[str, float] = {}\n\n    def add(self, name: str, seconds: float) -> None:\n        if name in self.results:\n            raise ValueError(f"{name} was added twice")\n        self.results[name] = seconds\n\n    def write(self) -> None:\n        text = json.dumps(self.results, indent=2, sort_keys=True)\n        (self.directory / "report.json").write_text(text)\n`,
  javascript: `export async function fetchUsers(client, { limit = 20, cursor } = {}) {\n  const params = new URLSearchParams({ limit: String(limit) });\n  if (cursor) params.set('cursor', cursor);\n  const response = await client.get(\`/api/users?\${params}\`);\n  if (!response.ok) {\n    throw new Error(\`request failed with status \${response.status}\`);\n  }\n  const { items, nextCursor } = await response.json();\n  return { users: items.map((item) => ({ id: item.id, name: item.displayName })), nextCursor };\n}\n`,
  sql: `SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue\nFROM customers AS c\nJOIN orders AS o ON o.customer_id = c.id\nWHERE o.created_at >= '2026-01-01' AND o.status <> 'cancelled'\nGROUP BY c.name\nHAVING SUM(o.total) > 1000\nORDER BY revenue DESC\nLIMIT 50;\n`,
};
const tool = {
  type: 'function',
  function: {
    name: 'search_orders',
    description: 'Search the orders of a customer by status and date, and return the most recent orders first.',
    parameters: {
      type: 'object',
      properties: {
        customer_id: { type: 'string', description: 'The identifier of the customer, as the tool get_customer returns it.' },
        status: { type: 'string', enum: ['open', 'shipped', 'delivered', 'cancelled'] },
        since: { type: 'string', format: 'date', description: 'Return only orders that were created on or after this date.' },
        limit: { type: 'integer', minimum: 1, maximum: 100, default: 20 },
      },
      required: ['customer_id'],
      additionalProperties: false,
    },
  },
};
const arrays = [10, 100, 1000, 100000];
const randoms = {
  digits: times(800, () => random(10)).join(''),
  hex: bytes(400).toString('hex'),
  upper_hex: bytes(400).toString('hex').toUpperCase(),
  base64: bytes(600).toString('base64'),
  base64url: bytes(600).toString('base64url'),
  uuids: times(20, uuid).join('\n'),
  json_uuids: JSON.stringify(times(20, uuid)),
  letters: times(800, () => String.fromCharCode(97 + random(26))).join(''),
  floats: JSON.stringify(times(100, () => random(1000000) / 1000000)),
  spaced_floats: times(100, () => (random(200000) / 100).toFixed(2)).join(', '),
  times: times(40, () => new Date(1790000000000 + random(100000000) * 1000).toISOString()).join('\n'),
};
for (const size of arrays) {
  const numbers = times(200, () => random(size));
  randoms[`numbers_below_${size}`] = JSON.stringify(numbers);
  randoms[`spaced_numbers_below_${size}`] = `[${numbers.join(', ')}]`;
}
const texts = [
  ...Object.values(prose).map((text) => ['prose', text]),
  ...Object.values(code).map((text) => ['code', text]),
  ['tools', JSON.stringify([tool])],
  ['tools', JSON.stringify([tool], null, 2)],
  ...Object.values(randoms).map((text) => ['random', text]),
];
const samples = texts.map(([kind, text]) => ({ class: kind, tokens: encode(text).length, text }));
console.log(JSON.stringify(samples, null, 1));
